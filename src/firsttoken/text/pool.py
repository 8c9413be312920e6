"""Text work in threads, so that it never blocks the event loop. What is done sooner than a thread woken stays here."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from firsttoken.core.clock import NS_PER_S, now_ns
from firsttoken.core.errors import InvalidRequest
from firsttoken.text.chat_template import ChatTemplate
from firsttoken.text.control_tokens import Rendered
from firsttoken.text.messages import count_characters
from firsttoken.text.pace import Pace
from firsttoken.text.prompt_cache import SHORT, TTL_NS, PromptCache
from firsttoken.text.tokenizer import Tokenizer, check_unicode

LARGE = 64 << 10
"""Characters from which a text takes the lane for large ones (about 15 ms of tokenising)."""

INLINE_NS = 100_000
"""Estimate below which a prompt is made in the event loop. To a thread and back is 60 us when nobody else runs and 300
beside 64 streams, and takes 30 us of the loop's own time; and a tenth of a millisecond is what others may wait for."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt ready for the engine: its ids as ``array('I')``, and when its text and its ids were known (ns of
    `core.clock`, for the marks TEMPLATED and TOKENIZED)."""

    text: str
    ids: array[int]
    templated_ns: int
    tokenized_ns: int


class TextPool:
    """Renders and tokenises in ``workers`` threads, and texts of `LARGE` characters or more in one thread of their
    own, so that a large prompt never makes a small one wait. With a ``pace`` to judge them by, prompts that are a
    matter of microseconds (`INLINE_NS`) take no thread. What a ``cache`` knows is not tokenised again; ``salt`` is who
    it is kept for.

    A prompt of more than ``max_chars`` characters is refused before any work is done on it. The queue has no bound of
    its own: what waits in it has been accepted by the server, which bounds the requests it holds. Work whose caller
    was cancelled before it began is dropped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        workers: int = 2,
        max_chars: int = 1 << 24,
        pace: Pace | None = None,
        cache: PromptCache | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.max_chars = max_chars
        self._token_chars = tokenizer.max_token_chars
        self._controls = tokenizer.control_tokens(template.writes if template is not None else ())
        self._pace = pace
        self.cache = cache
        self._sweep: asyncio.TimerHandle | None = None
        # The library would hand each text to a thread of its own and wait for it, which pays for batches alone.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="text")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="text-large")

    def limit_to(self, max_model_len: int) -> None:
        """Refuse what cannot fit in so many tokens."""
        self.max_chars = max_model_len * self._token_chars

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        param: str = "prompt",
        batch: int = 1,
        salt: str = "",
        cut: bool = False,
    ) -> RenderedPrompt:
        """Ids of ``text``, one of ``batch`` that are asked for at once and so judged together. Raises
        `InvalidRequest` naming ``param`` when it is too long, unless its tokens will be ``cut``, or not valid
        Unicode."""
        if not cut:
            self._check_size(len(text), param)
        self._plan_sweep()
        started = now_ns()

        def work() -> RenderedPrompt:
            check_unicode(text, param=param)
            if not (parse_special or self._controls.harmless(text)):
                ids = self._controls.encode(text)
                ids = self.tokenizer.with_affixes(ids) if add_special_tokens else ids
            elif self.cache is not None and len(text) >= SHORT:
                ids = self.cache.encode(text, salt)
                ids = self.tokenizer.with_affixes(ids) if add_special_tokens else ids
            else:
                ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return RenderedPrompt(text, ids, started, now_ns())

        if self._pace is not None and batch * self._pace.of_text(text, INLINE_NS) <= INLINE_NS:
            return work()
        return await self._run(len(text), work)

    async def render_and_encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        salt: str = "",
    ) -> RenderedPrompt:
        """The prompt of a chat. The template decides about BOS: the tokenizer adds nothing to what it wrote.

        Raises `InvalidRequest` when the model has no chat template, and as `ChatTemplate.render` does.
        """
        template = self.template
        if template is None:
            raise InvalidRequest(
                "this model has no chat template, so it cannot chat; use /v1/completions with a prompt of your own",
                param="messages",
                code="no_chat_template",
            )
        size = count_characters(messages)
        self._check_size(size, "messages")
        self._plan_sweep()

        def render() -> tuple[Rendered, int]:
            rendered = template.render_apart(
                messages,
                self._controls,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=template_kwargs,
            )
            self._check_size(len(rendered.text), "messages")
            return rendered, now_ns()

        def encode(rendered: Rendered, templated: int) -> RenderedPrompt:
            return RenderedPrompt(rendered.text, self._encode(rendered, salt), templated, now_ns())

        rich = bool(tools) or not all(isinstance(value, bool) for value in (template_kwargs or {}).values())
        if rich or self._pace is None:
            return await self._run(size, lambda: encode(*render()))
        soon = self._pace.of_chat(messages, INLINE_NS) <= INLINE_NS
        if not soon and (
            self.cache is None or size < SHORT or self._pace.of_known_chat(messages, INLINE_NS) > INLINE_NS
        ):
            return await self._run(size, lambda: encode(*render()))
        rendered, templated = render()
        if soon:
            return encode(rendered, templated)
        if rendered.guarded is not None:
            return await self._run(size, lambda: encode(rendered, templated))
        return await self._look_up(size, rendered.text, templated, salt)

    def _encode(self, rendered: Rendered, salt: str) -> array[int]:
        if rendered.guarded is None:
            if self.cache is None:
                return self.tokenizer.encode(rendered.text, add_special_tokens=False)
            return self.cache.encode(rendered.text, salt)
        if self.cache is None:
            return self._controls.encode(rendered.text, self._controls.spans(rendered.guarded))
        return self.cache.encode_apart(rendered, self._controls, salt)

    async def _look_up(self, size: int, text: str, templated: int, salt: str) -> RenderedPrompt:
        """The prompt from the cache, here and now if little of it has to be made."""
        cache, pace = self.cache, self._pace
        assert cache is not None
        assert pace is not None
        found = cache.look_up(text, salt)
        if sum(pace.of_text(piece, INLINE_NS) for piece in found.missing) <= INLINE_NS:
            return RenderedPrompt(text, cache.complete(found), templated, now_ns())
        return await self._run(size, lambda: RenderedPrompt(text, cache.complete(found), templated, now_ns()))

    async def _run(self, size: int, work: Callable[[], _T]) -> _T:
        threads = self._large if size >= LARGE else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def _plan_sweep(self) -> None:
        """Look once in a while for what nobody asks for any more, as long as there is something."""
        if self.cache is not None and self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(TTL_NS / NS_PER_S, self._start_sweep, self.cache)

    def _start_sweep(self, cache: PromptCache) -> None:
        self._sweep = None
        swept = asyncio.get_running_loop().run_in_executor(self._threads, cache.drop_expired)
        swept.add_done_callback(lambda done: self._plan_sweep() if not done.cancelled() and done.result() else None)

    def _check_size(self, size: int, param: str) -> None:
        if size > self.max_chars:
            raise InvalidRequest(
                f"{param} has {size} characters; this model's context cannot hold more than {self.max_chars}",
                param=param,
                code="context_length_exceeded",
            )

    def close(self) -> None:
        """Stop the threads; work that has not begun is dropped."""
        if self._sweep is not None:
            self._sweep.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._large.shutdown(wait=False, cancel_futures=True)
