"""What `LLM` makes of prompts besides answers: vectors, and how alike they are. Names follow vLLM's."""

from __future__ import annotations

from abc import ABC, abstractmethod
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

_WHOLE = PoolingParams()


def pooling_params(truncate_prompt_tokens: int | None) -> SamplingParams:
    """Of a prompt that is to be pooled: nothing is generated."""
    return SamplingParams(temperature=0, max_tokens=0, detokenize=False, truncate_prompt_tokens=truncate_prompt_tokens)


class Pooled(NamedTuple):
    """A prompt's tokens, as they were computed, and its vector."""

    tokens: list[int]
    vector: Vector


class PoolingCalls(ABC):
    """The methods; whoever has them runs the prompts."""

    @abstractmethod
    def _pool(
        self, prompts: list[Prompt], params: PoolingParams, truncate_prompt_tokens: int | None, *, use_tqdm: bool
    ) -> list[Pooled]: ...

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams = _WHOLE,
        use_tqdm: bool = False,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt, in their order. ``truncate_prompt_tokens`` cuts prompts to so many, their last
        (-1: to what fits); without it one that is too long is an error. Raises as `LLM.generate`."""
        found = self._pool(split_prompts(prompts), pooling_params, truncate_prompt_tokens, use_tqdm=use_tqdm)
        return [
            EmbeddingRequestOutput(str(number), EmbeddingOutput(one.vector.tolist()), one.tokens)
            for number, one in enumerate(found)
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams = _WHOLE,
        *,
        pooling_task: str = "embed",
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[PoolingRequestOutput]:
        """`embed`, as arrays. ``pooling_task`` must be "embed": others are of models that are not served here."""
        if pooling_task != "embed":
            raise InvalidRequest(
                f"pooling_task {pooling_task!r:.80} is not supported: 'embed' is", param="pooling_task"
            )
        found = self._pool(split_prompts(prompts), pooling_params, truncate_prompt_tokens, use_tqdm=use_tqdm)
        return [
            PoolingRequestOutput(str(number), PoolingOutput(one.vector), one.tokens) for number, one in enumerate(found)
        ]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[ScoringRequestOutput]:
        """The cosine of the vectors of each of ``data_2`` with its own of ``data_1``, or with the only one."""
        left, right = split_prompts(data_1), split_prompts(data_2)
        if len(left) not in (1, len(right)):
            raise InvalidRequest(
                f"data_1 has {len(left)} prompts and data_2 {len(right)}: give one for all, or as many", param="data_1"
            )
        found = self._pool([*left, *right], _WHOLE, truncate_prompt_tokens, use_tqdm=use_tqdm)
        ones, others = found[: len(left)], found[len(left) :]
        pairs = zip(ones * len(others) if len(ones) == 1 else ones, others, strict=True)
        return [
            ScoringRequestOutput(
                str(number), ScoringOutput(cosine(one.vector, other.vector)), one.tokens + other.tokens
            )
            for number, (one, other) in enumerate(pairs)
        ]
