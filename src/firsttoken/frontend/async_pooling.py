"""What `AsyncLLM` makes of prompts besides answers, under the names that `LLM` has."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence

from firsttoken.core.errors import Overloaded
from firsttoken.core.outputs import EmbeddingRequestOutput, PoolingRequestOutput, ScoringRequestOutput
from firsttoken.core.pooling import Pooling, PoolingKind, PoolingParams
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.frontend import vectors
from firsttoken.frontend.admission import token_ids
from firsttoken.frontend.generation import Generation
from firsttoken.frontend.pooled import WHOLE, Pairs, Pooled, arrays, check_task, embeddings, pooling_params
from firsttoken.frontend.prompts import Prompt, cut_as_asked, split_prompt, split_prompts
from firsttoken.transport.messages import EngineInfo

_Prompts = Prompt | Sequence[Prompt]


class AsyncPoolingCalls(ABC):
    """The methods; whoever has them opens requests. As many run at once as have rows in the engine, twice over."""

    @property
    @abstractmethod
    def info(self) -> EngineInfo: ...

    @property
    @abstractmethod
    def pooling(self) -> Pooling: ...

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def tokenize(self, text: str, *, batch: int = 1, cut: bool = False) -> array[int]: ...

    @abstractmethod
    def open(self, prompt: array[int], params: SamplingParams, *, pooling: PoolingKind | None = None) -> Generation: ...

    async def embed(
        self,
        prompts: _Prompts,
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams = WHOLE,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt, in their order. ``truncate_prompt_tokens`` cuts prompts to so many, their last
        (-1: to what fits); without it one that is too long is an error. Raises as `AsyncLLM.generate`, for the first
        that failed; the others are then ended. What the engine has no room for yet waits here."""
        return embeddings(await self._vectors(split_prompts(prompts), pooling_params, truncate_prompt_tokens))

    async def encode(
        self,
        prompts: _Prompts,
        pooling_params: PoolingParams = WHOLE,
        *,
        pooling_task: str = "embed",
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput]:
        """`embed`, as arrays. ``pooling_task`` must be "embed": others are of models that are not served here. (A
        text's token ids are `tokenize`'s.)"""
        check_task(pooling_task)
        return arrays(await self._vectors(split_prompts(prompts), pooling_params, truncate_prompt_tokens))

    async def score(
        self, data_1: _Prompts, data_2: _Prompts, *, truncate_prompt_tokens: int | None = None
    ) -> list[ScoringRequestOutput]:
        """The cosine of the vectors of each of ``data_2`` with its own of ``data_1``, or with the only one."""
        pairs = Pairs(data_1, data_2)
        return pairs.scores(await self._vectors(pairs.prompts, WHOLE, truncate_prompt_tokens))

    async def _vectors(
        self, prompts: list[Prompt], params: PoolingParams, truncate_prompt_tokens: int | None
    ) -> list[Pooled]:
        await self.start()
        params.check_size(self.info.hidden_size)
        nothing = pooling_params(truncate_prompt_tokens)
        tokens = [await self._tokens(one, nothing, len(prompts)) for one in prompts]
        found = [b""] * len(tokens)
        left = iter(range(len(tokens)))

        async def work(numbers: Iterator[int]) -> None:
            for number in numbers:
                found[number] = await self._read(tokens[number], nothing)

        tasks = [asyncio.create_task(work(left)) for _ in range(min(len(tokens), 2 * self.info.max_num_seqs))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [
            Pooled(list(ids), vectors.finish(pooled, self.pooling, params))
            for ids, pooled in zip(tokens, found, strict=True)
        ]

    async def _tokens(self, prompt: Prompt, params: SamplingParams, count: int) -> array[int]:
        text, ids = split_prompt(prompt)
        if ids is None and text is not None:
            ids = await self.tokenize(text, batch=count, cut=params.truncate_prompt_tokens is not None)
        return cut_as_asked(token_ids(ids or ()), params, self.info.max_model_len)

    async def _read(self, tokens: array[int], params: SamplingParams) -> bytes:
        while True:
            generation = self.open(tokens, params, pooling=self.pooling.kind)
            try:
                async for _ in generation:
                    pass
                assert generation.pooled is not None, "a request to be pooled ended without a vector"
                return generation.pooled
            except Overloaded as error:
                await asyncio.sleep(error.retry_after_s)
            finally:
                generation.cancel()  # does nothing after the end
