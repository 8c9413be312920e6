"""The scheduler's options."""

from __future__ import annotations

import msgspec

from firsttoken.core.errors import ConfigError


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``max_num_seqs`` rows (slots) on the device; ``max_model_len`` tokens of prompt and output together.

    ``watermark``: share of the KV blocks that admission leaves to running decodes; one block for each of them is
    left, up to that share. ``max_passes``: in how many steps a waiting request may be overtaken before nothing
    behind it is admitted any more. ``lookahead``: how many waiting requests a step considers.
    Raises `ConfigError`.
    """

    max_num_seqs: int
    max_model_len: int
    watermark: float = 0.05
    max_passes: int = 32
    lookahead: int = 64

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "lookahead"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} must be 1 or more, got {value!r}")
        if self.max_passes < 0:
            raise ConfigError(f"max_passes must be 0 or more, got {self.max_passes!r}")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark must be in [0, 1), got {self.watermark!r}")
