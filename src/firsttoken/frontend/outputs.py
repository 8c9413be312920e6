"""Cumulative outputs, as vLLM's Python API gives them, made from deltas."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from firsttoken.core.outputs import CompletionOutput, Logprob, RequestOutput
from firsttoken.core.plan import PromptLogprobs, TokenLogprobs
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.frontend.answer import Delta

if TYPE_CHECKING:
    from firsttoken.checkpoint.model_config import GenerationConfig
    from firsttoken.text.tokenizer import Tokenizer


class Accumulator:
    """Everything that the ``n`` answers of one request have said so far."""

    def __init__(
        self, request_id: str, prompt: str | None, prompt_token_ids: array[int], n: int, tokenizer: Tokenizer | None
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids.tolist()
        self._tokenizer = tokenizer
        self._texts = [""] * n
        self._tokens: list[list[int]] = [[] for _ in range(n)]
        self._logprobs: list[list[Mapping[int, Logprob]] | None] = [None] * n
        self._sums = [0.0] * n
        self._prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None
        self.pooled: bytes | None = None
        self._ends: list[tuple[str | None, int | str | None]] = [(None, None)] * n

    @property
    def finished(self) -> bool:
        return all(reason is not None for reason, _ in self._ends)

    def add(self, delta: Delta) -> None:
        index = delta.index
        self._texts[index] += delta.text
        self._tokens[index] += delta.token_ids
        if delta.logprobs is not None:
            entries = self._logprobs[index] or []
            for token, logprobs in zip(delta.token_ids, delta.logprobs, strict=True):
                self._sums[index] += logprobs.logprob
                entries.append(self._entry(token, logprobs))
            self._logprobs[index] = entries
        self._ends[index] = (delta.finish_reason, delta.stop_reason)

    def look(self, found: PromptLogprobs | None) -> None:
        """Take the prompt's log-probabilities; a microsecond or more for each token and alternative."""
        if found is not None and self._prompt_logprobs is None:
            entries = zip(self._prompt_token_ids[1:], found.entries(), strict=True)
            self._prompt_logprobs = [None, *(self._entry(token, entry) for token, entry in entries)]

    async def look_aside(self, found: PromptLogprobs | None) -> None:
        """The same in a thread."""
        if found is not None and self._prompt_logprobs is None:
            await asyncio.to_thread(self.look, found)

    def output(self, *, cached_tokens: int = 0, metrics: dict[str, Any] | None = None) -> RequestOutput:
        """The state so far, all answers in order of their index; later deltas do not change it."""
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[self._completion(index) for index in range(len(self._texts))],
            finished=self.finished,
            num_cached_tokens=cached_tokens,
            metrics=metrics or {},
            prompt_logprobs=self._prompt_logprobs,
        )

    def _completion(self, index: int) -> CompletionOutput:
        logprobs = self._logprobs[index]
        reason, stop_reason = self._ends[index]
        return CompletionOutput(
            index=index,
            text=self._texts[index],
            token_ids=list(self._tokens[index]),
            cumulative_logprob=None if logprobs is None else self._sums[index],
            logprobs=None if logprobs is None else list(logprobs),
            finish_reason=reason,
            stop_reason=stop_reason,
        )

    def _entry(self, token: int, logprobs: TokenLogprobs) -> dict[int, Logprob]:
        """The chosen token first, then the most likely ones, as vLLM orders them."""
        entry = {token: Logprob(logprobs.logprob, logprobs.rank, self._decoded(token))}
        for rank, (other, value) in enumerate(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True), 1):
            if other not in entry:
                entry[other] = Logprob(value, rank, self._decoded(other))
        return entry

    def _decoded(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token)


def default_params(generation: GenerationConfig) -> SamplingParams:
    """What a caller gets who gives no sampling parameters: the checkpoint's own values, else `SamplingParams`'."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = {name: getattr(generation, name) for name in names if getattr(generation, name) is not None}
    return SamplingParams(**values)
