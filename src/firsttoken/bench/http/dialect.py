"""What a server takes: its route, and which of the optional fields; a request's body in these terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

# Ids below these are tried, the most first: nearly every vocabulary has 32,000, test models have less.
VOCABULARIES = (32_000, 1_000, 256)
Prompt = Sequence[int] | str


@dataclass(frozen=True)
class Dialect:
    """``vocab`` is the bound of random token ids, None for prompts of text. The other fields say whether a request
    has the field of that name; ``continuous_usage_stats`` and ``include_usage`` are of ``stream_options``."""

    model: str
    chat: bool = False
    vocab: int | None = VOCABULARIES[0]
    include_usage: bool = True
    continuous_usage_stats: bool = True
    return_token_ids: bool = False
    ignore_eos: bool = True
    temperature: bool = True
    max_completion_tokens: bool = False

    @property
    def route(self) -> str:
        return "/chat/completions" if self.chat else "/completions"

    @property
    def fields(self) -> list[str]:
        """The optional fields that are sent."""
        names = ("include_usage", "continuous_usage_stats", "return_token_ids", "ignore_eos", "temperature")
        return [name for name in names if getattr(self, name)]

    def body(self, prompt: Prompt, output: int) -> bytes:
        """Ask for ``output`` tokens, greedily, as a stream."""
        fields: dict[str, Any] = {"model": self.model}
        if self.chat:
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        fields["max_completion_tokens" if self.max_completion_tokens else "max_tokens"] = output
        fields["stream"] = True
        if self.include_usage:
            fields["stream_options"] = {"include_usage": True}
            if self.continuous_usage_stats:
                fields["stream_options"]["continuous_usage_stats"] = True
        if self.temperature:
            fields["temperature"] = 0
        for name in ("ignore_eos", "return_token_ids"):
            if getattr(self, name):
                fields[name] = True
        return msgspec.json.encode(fields)

    def without(self, refusal: str) -> Dialect | None:
        """What to try after a server refused this with these words; None when there is nothing left to leave out.

        A field that the words name goes first; else those that fewest servers know.
        """
        words = refusal.lower()
        if "max_completion_tokens" in words and not self.max_completion_tokens:
            return replace(self, max_completion_tokens=True)
        optional = [name for name in _RAREST_FIRST if getattr(self, name)]
        for name in optional:
            if name in words or (name == "include_usage" and "stream_options" in words):
                return self._without(name)
        if self.vocab is not None and any(word in words for word in ("prompt", "token", "vocab", "string")):
            return self._smaller_vocabulary()
        if optional and optional[0] != "temperature":
            return self._without(optional[0])
        if self.vocab is not None:
            return self._smaller_vocabulary()
        return replace(self, temperature=False) if self.temperature else None

    def _without(self, name: str) -> Dialect:
        change: dict[str, Any] = {name: False}
        return replace(self, **change)

    def _smaller_vocabulary(self) -> Dialect:
        assert self.vocab is not None
        return replace(self, vocab=next((size for size in VOCABULARIES if size < self.vocab), None))


_RAREST_FIRST = ("return_token_ids", "continuous_usage_stats", "ignore_eos", "include_usage", "temperature")
