"""What the Python API gives back. Names follow vLLM's, so that code written for it reads them unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True)
class Logprob:
    """Natural logarithm of a token's probability, its rank (1 = most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's ``n`` answers, cumulative: everything generated so far."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: list[Mapping[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request's state as seen by the caller; ``finished`` when all its answers have ended."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt's vector."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """A prompt's vector, float32 ``[n]``."""

    data: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How alike two texts are: the cosine of their vectors."""

    score: float


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: Sequence[int]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: Sequence[int]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """``prompt_token_ids`` are those of both texts."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: Sequence[int]
    finished: bool = True
