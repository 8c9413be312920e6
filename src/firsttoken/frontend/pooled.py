"""What prompts' vectors are told as: by themselves, and how alike they are. Names follow vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from firsttoken.core.pooling import PoolingParams
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.frontend.prompts import Prompt, split_prompts
from firsttoken.frontend.vectors import Vector, cosine

WHOLE = PoolingParams()


class Pooled(NamedTuple):
    """A prompt's tokens, as they were computed, and its vector."""

    tokens: list[int]
    vector: Vector


def pooling_params(truncate_prompt_tokens: int | None) -> SamplingParams:
    """Of a prompt that is to be pooled: nothing is generated."""
    return SamplingParams(temperature=0, max_tokens=0, detokenize=False, truncate_prompt_tokens=truncate_prompt_tokens)


def embeddings(found: Sequence[Pooled]) -> list[EmbeddingRequestOutput]:
    return [
        EmbeddingRequestOutput(str(number), EmbeddingOutput(one.vector.tolist()), one.tokens)
        for number, one in enumerate(found)
    ]


def arrays(found: Sequence[Pooled]) -> list[PoolingRequestOutput]:
    return [
        PoolingRequestOutput(str(number), PoolingOutput(one.vector), one.tokens) for number, one in enumerate(found)
    ]


def check_task(task: str) -> None:
    """Raises `InvalidRequest` for a task of models that are not served here."""
    if task != "embed":
        raise InvalidRequest(f"pooling_task {task!r:.80} is not supported: 'embed' is", param="pooling_task")


class Pairs:
    """Each of ``data_2`` with its own of ``data_1``, or with the only one. Raises `InvalidRequest`."""

    def __init__(self, data_1: Prompt | Sequence[Prompt], data_2: Prompt | Sequence[Prompt]) -> None:
        left, right = split_prompts(data_1), split_prompts(data_2)
        if len(left) not in (1, len(right)):
            raise InvalidRequest(
                f"data_1 has {len(left)} prompts and data_2 {len(right)}: give one for all, or as many", param="data_1"
            )
        self.prompts = [*left, *right]
        self._left = len(left)

    def scores(self, found: Sequence[Pooled]) -> list[ScoringRequestOutput]:
        """The cosines, of what was found for ``prompts``."""
        ones, others = found[: self._left], found[self._left :]
        pairs = zip([ones[0]] * len(others) if len(ones) == 1 else ones, others, strict=True)
        return [
            ScoringRequestOutput(
                str(number), ScoringOutput(cosine(one.vector, other.vector)), one.tokens + other.tokens
            )
            for number, (one, other) in enumerate(pairs)
        ]
