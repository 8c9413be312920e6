"""What `LLM` makes of prompts besides answers: vectors, and how alike they are. Names follow vLLM's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from firsttoken.core.outputs import EmbeddingRequestOutput, PoolingRequestOutput, ScoringRequestOutput
from firsttoken.core.pooling import PoolingParams
from firsttoken.frontend.pooled import WHOLE, Pairs, Pooled, arrays, check_task, embeddings
from firsttoken.frontend.prompts import Prompt, split_prompts


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
        pooling_params: PoolingParams = WHOLE,
        use_tqdm: bool = False,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt, in their order. ``truncate_prompt_tokens`` cuts prompts to so many, their last
        (-1: to what fits); without it one that is too long is an error. Raises as `LLM.generate`."""
        return embeddings(self._pool(split_prompts(prompts), pooling_params, truncate_prompt_tokens, use_tqdm=use_tqdm))

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams = WHOLE,
        *,
        pooling_task: str = "embed",
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[PoolingRequestOutput]:
        """`embed`, as arrays. ``pooling_task`` must be "embed": others are of models that are not served here."""
        check_task(pooling_task)
        return arrays(self._pool(split_prompts(prompts), pooling_params, truncate_prompt_tokens, use_tqdm=use_tqdm))

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[ScoringRequestOutput]:
        """The cosine of the vectors of each of ``data_2`` with its own of ``data_1``, or with the only one."""
        pairs = Pairs(data_1, data_2)
        return pairs.scores(self._pool(pairs.prompts, WHOLE, truncate_prompt_tokens, use_tqdm=use_tqdm))
