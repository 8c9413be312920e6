"""A vector in place of a prompt's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from firsttoken.core.errors import InvalidRequest

# The mean of a prompt's hidden states, or that of its last token.
PoolingKind = Literal["mean", "last"]
POOLING_KINDS: tuple[PoolingKind, ...] = ("mean", "last")


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a model's vectors are made. ``normalize``: they have length 1."""

    kind: PoolingKind = "last"
    normalize: bool = True


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """What a caller wants of a vector, under vLLM's names: its first ``dimensions`` numbers, all with None; of length 1
    or not (``normalize``), as the model has it with None. Raises `InvalidRequest`."""

    dimensions: int | None = None
    normalize: bool | None = None

    def __post_init__(self) -> None:
        size, flag = self.dimensions, self.normalize
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise InvalidRequest(f"dimensions must be a whole number, 1 or more, got {size!r:.80}", param="dimensions")
        if flag is not None and not isinstance(flag, bool):
            raise InvalidRequest(f"normalize must be true or false, got {flag!r:.80}", param="normalize")

    def check_size(self, size: int) -> None:
        """Refuse more numbers than the model's ``size``; raises `InvalidRequest`."""
        if self.dimensions is not None and self.dimensions > size:
            raise InvalidRequest(
                f"dimensions must be in [1, {size}], which this model's vectors have, got {self.dimensions}",
                param="dimensions",
            )
