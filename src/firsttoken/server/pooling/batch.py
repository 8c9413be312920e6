"""Many inputs of one request to the engine and their vectors back, in their order."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from firsttoken.core.pooling import PoolingParams
from firsttoken.core.service import Terms
from firsttoken.core.timeline import Mark, Timeline
from firsttoken.frontend import vectors
from firsttoken.frontend.flow import flow
from firsttoken.frontend.pooled import pooling_params
from firsttoken.frontend.prompts import cut_to_last
from firsttoken.frontend.vectors import Vector
from firsttoken.server.call import Call
from firsttoken.server.cost import allow
from firsttoken.server.decode import Prompt
from firsttoken.server.pooling.schema import PoolingRequest
from firsttoken.server.sampling import whole
from firsttoken.server.service import agree
from firsttoken.server.state import AppState
from firsttoken.server.streaming import check_whole, naming, source

if TYPE_CHECKING:
    from firsttoken.frontend.generation import Generation

PARAMS = pooling_params(None)


class PoolingBatch:
    """The inputs of one call. `read` asks the engine for as many at once as have rows there, twice over: more would
    wait in its queue, where others stand too."""

    def __init__(self, state: AppState, call: Call, request: PoolingRequest, names: Sequence[str]) -> None:
        """``names`` are what errors call the inputs. Raises `ApiError`."""
        self._state = state
        self._call = call
        self._request = request
        self._names = names
        self._terms: Terms
        self._terms, _ = agree(request, call.caller, call.timeline.times[0])
        self._prompts: list[array[int]] = []
        self._pooled: list[bytes] = [b""] * len(names)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self._prompts))

    async def encode(self, inputs: Sequence[Prompt], param: str) -> None:
        """Tokens of the inputs, within what the request may cost. ``param`` is the field that holds them. Raises
        `ApiError` and `InvalidRequest`."""
        timeline = self._call.timeline
        timeline.stamp(Mark.PARSED)
        timeline.stamp(Mark.TEMPLATED)
        work = [self._encode(one, name) for one, name in zip(inputs, self._names, strict=True)]
        self._prompts = [await work[0]] if len(work) == 1 else list(await asyncio.gather(*work))
        timeline.stamp(Mark.TOKENIZED)
        allow(self._state, self._call, self._prompts, PARAMS, param=param)

    async def _encode(self, given: Prompt, name: str) -> array[int]:
        llm, request = self._state.llm, self._request
        keep = whole("truncate_prompt_tokens", request.truncate_prompt_tokens)
        with naming(name):
            if isinstance(given, str):
                given = await llm.tokenize(
                    given,
                    add_special_tokens=request.add_special_tokens is not False,
                    parse_special=self._state.parse_special,
                    batch=len(self._names),
                    cache_salt=self._terms.salt,
                    cut=keep is not None,
                )
            return cut_to_last(given, keep, llm.info.max_model_len)

    async def read(self, params: PoolingParams) -> list[Vector]:
        """The vectors, in the order of the inputs. Raises what `AsyncLLM.open` and a `Generation` raise, of the input
        that was first to fail; the others are then ended."""
        left = iter(range(len(self._prompts)))
        width = min(len(self._prompts), 2 * self._state.llm.info.max_num_seqs)
        if width == 1:
            await self._work(left)
        else:
            tasks = [asyncio.create_task(self._work(left)) for _ in range(width)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        pooling = self._state.llm.pooling
        return [vectors.finish(pooled, pooling, params) for pooled in self._pooled]

    async def _work(self, left: Iterator[int]) -> None:
        for index in left:
            self._pooled[index] = await self._pool(index)

    async def _pool(self, index: int) -> bytes:
        call, name = self._call, self._names[index]
        # Each input has its own way from here on.
        timeline = Timeline(call.timeline.stamps()) if index else call.timeline
        with naming(name):
            generation: Generation = self._state.llm.open(
                self._prompts[index],
                PARAMS,
                request_id=call.request_id,
                timeline=timeline,
                terms=self._terms,
                pooling=self._state.llm.pooling.kind,
                goes_on=bool(call.generations),
            )
        call.generations.append(generation)
        try:
            await flow(source(generation, check_whole, prompt_field=name))
        finally:
            generation.cancel()  # does nothing after the end
        assert generation.pooled is not None, "a request to be pooled ended without a vector"
        return generation.pooled
