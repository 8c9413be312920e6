"""From an engine's tokens to what the caller sees: one answer's text, with its stop strings. No asyncio, no I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from firsttoken.core.clock import now_ns
from firsttoken.core.plan import TokenLogprobs
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.text.stop import StopHit, StopScanner
from firsttoken.transport.messages import RequestDelta

if TYPE_CHECKING:
    from firsttoken.text.tokenizer import Tokenizer


class Delta(msgspec.Struct, gc=False):
    """What is new in answer ``index``. ``text`` may be empty while a character or a stop string is incomplete.

    ``token_ids`` are all tokens the answer gained, an end token included; ``logprobs`` has one entry for each of
    them, or is None when none were asked for. The answer's last delta has ``finish_reason``: "stop", "length" or
    "abort"; ``stop_reason`` is the stop string or the caller's stop token id that ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None


class Answer:
    """The text side of one answer: detokeniser and stop scanner behind one `push`.

    Stop strings are looked for in text that starts after the first ``min_tokens`` tokens. An end token's own text
    is shown only with ``include_stop_str_in_output`` (and then ``skip_special_tokens`` still applies to it). ``shown``
    are control tokens that whoever reads the text must see whatever ``skip_special_tokens`` says.
    """

    __slots__ = (
        "_detokenizer",
        "_include",
        "_min_tokens",
        "_scanner",
        "_stop_ids",
        "_text_of",
        "finish_reason",
        "index",
        "num_tokens",
        "scan_ns",
    )

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        stop_ids: Collection[int],
        tokenizer: Tokenizer | None,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.scan_ns = 0  # of the last push, the search for stop strings
        self.finish_reason: str | None = None
        self._stop_ids = stop_ids
        self._min_tokens = params.min_tokens
        self._include = params.include_stop_str_in_output
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            skip = params.skip_special_tokens
            self._detokenizer = tokenizer.detokenizer(skip_special_tokens=skip, continuation=True, shown=shown)
        self._text_of = _no_text if self._detokenizer is None else self._detokenizer.push
        self._scanner = StopScanner(params.stops, self._include) if params.stops else None

    def push(
        self,
        tokens: list[int],
        logprobs: list[TokenLogprobs] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | None = None,
    ) -> Delta:
        """Take new tokens; with ``finish_reason`` they are the last ones and all held text is released.

        When a stop string is found the delta ends at the token that completed it, whatever came after. ``tokens`` may
        be kept: they must not change.
        """
        if finish_reason is None:  # nearly always
            if self._scanner is None:
                self.num_tokens += len(tokens)
                text_of = self._text_of
                return Delta(self.index, text_of(tokens), tokens, logprobs, None, stop_reason)
            if len(tokens) == 1 and self.num_tokens >= self._min_tokens:
                return self._push_one(self._scanner, tokens, logprobs, stop_reason)
        shown = tokens
        if finish_reason == "stop" and tokens and not self._include and tokens[-1] in self._stop_ids:
            shown = tokens[:-1]
        text, hit, used = self._read(shown, last=finish_reason is not None)
        kept = tokens
        reason: int | str | None = stop_reason
        if hit is not None:
            finish_reason, reason = "stop", hit
            if used is not None:
                kept = kept[:used]
                logprobs = None if logprobs is None else logprobs[:used]
        self.num_tokens += len(kept)
        self.finish_reason = finish_reason
        return Delta(self.index, text, kept, logprobs, finish_reason, reason)

    def _push_one(
        self, scanner: StopScanner, tokens: list[int], logprobs: list[TokenLogprobs] | None, stop_reason: int | None
    ) -> Delta:
        """What `push` does for one token that is not the last: there is nothing to cut."""
        text_of = self._text_of
        text = text_of(tokens)
        self.num_tokens += 1
        if scanner.passes(text):  # in less time than it takes to look at the clock
            self.scan_ns = 0
            return Delta(self.index, text, tokens, logprobs, None, stop_reason)
        began = now_ns()
        found = scanner.push(text)
        self.scan_ns = now_ns() - began
        if isinstance(found, str):
            return Delta(self.index, found, tokens, logprobs, None, stop_reason)
        self.finish_reason = "stop"
        return Delta(self.index, found.text, tokens, logprobs, "stop", found.stop)

    def _read(self, tokens: Sequence[int], *, last: bool) -> tuple[str, str | None, int | None]:
        """The text to show now, the stop string found, and how many of ``tokens`` completed it: None for all, and
        the end token that is not shown."""
        if self._detokenizer is None:
            return "", None, None
        if self._scanner is None:
            text = self._detokenizer.push(tokens)
            return (text + self._detokenizer.finish() if last else text), None, None
        return self._scan(tokens, last=last)

    def _scan(self, tokens: Sequence[int], *, last: bool) -> tuple[str, str | None, int | None]:
        """Token by token, so that tokens and log-probabilities can be cut where the stop string ended."""
        assert self._detokenizer is not None
        assert self._scanner is not None
        self.scan_ns = 0
        shown = ""
        for position, token in enumerate(tokens, 1):
            text = self._detokenizer.push((token,))
            if self.num_tokens + position <= self._min_tokens:
                shown += text
                continue
            found = self._search(text)
            if isinstance(found, StopHit):
                return shown + found.text, found.stop, position
            shown += found
        if last:
            text = self._detokenizer.finish()
            if self.num_tokens + len(tokens) <= self._min_tokens:
                return shown + text, None, None
            found = self._search(text)
            if isinstance(found, StopHit):  # in what stands for half a character: known only now, after every token
                return shown + found.text, found.stop, None
            shown += found + self._scanner.finish()
        return shown, None, None

    def _search(self, text: str) -> str | StopHit:
        assert self._scanner is not None
        began = now_ns()
        found = self._scanner.push(text)
        self.scan_ns += now_ns() - began
        return found


def _no_text(tokens: Sequence[int]) -> str:
    """Of a model without a tokenizer, and for callers who want none."""
    return ""


def merged(deltas: Sequence[RequestDelta]) -> tuple[list[int], list[TokenLogprobs] | None]:
    """Tokens and log-probabilities of consecutive deltas of one answer."""
    tokens = [token for delta in deltas for token in delta.tokens]
    if all(delta.logprobs is None for delta in deltas):
        return tokens, None
    return tokens, [entry for delta in deltas for entry in delta.logprobs or ()]
