"""How long a prompt will take to become tokens: known before the work begins, to choose where to do it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from firsttoken.core.clock import now_ns
from firsttoken.core.errors import InvalidRequest

if TYPE_CHECKING:
    from firsttoken.text.chat_template import ChatTemplate
    from firsttoken.text.prompt_cache import PromptCache
    from firsttoken.text.tokenizer import Tokenizer

NEVER_NS = math.inf
"""The estimate for what is not worth one: longer than any limit."""

_ROUNDS = 20
# Prose, code, figures and other scripts: what tokenizers cut short and what they cut long.
_SAMPLE = (
    "When the ship had been made fast, the captain went below to find his charts. Nobody had touched them since 1893, "
    "and the damp had got into the oilskin: the coast was a brown stain with 27 soundings. He swore softly, lit the "
    "lamp, and began to copy what he could read.\n\ndef cut(line):\n    return [one for one in line.split() if one]\n"
    "Zürich, Ürümqi, 東京, Αθήνα; 3.14159 * 2 == 6.28318\n"
)
_SAMPLE_BYTES = len(_SAMPLE.encode())
_LONG = [{"role": "user", "content": _SAMPLE * 20}]
_CHAT = [{"role": role, "content": "Hi"} for role in ("user", "assistant", "user", "assistant", "user")]


@dataclass(frozen=True, slots=True)
class Pace:
    """What a tokenizer takes for a byte of text, and a chat template for a chat and for each message in it, in ns.
    ``known_ns`` is for a character of a chat whose tokens are in a `PromptCache`: rendered, cut and looked up."""

    byte_ns: float
    chat_ns: float
    message_ns: float
    known_ns: float = NEVER_NS

    @classmethod
    def measure(cls, tokenizer: Tokenizer, template: ChatTemplate | None, cache: PromptCache | None = None) -> Pace:
        """By trying them, some milliseconds; a ``cache`` of its own, which keeps what was tried. A template that
        refuses the trial is taken for endlessly slow."""
        byte_ns = _fastest(lambda: tokenizer.encode(_SAMPLE, add_special_tokens=False)) / _SAMPLE_BYTES
        if template is None:
            return cls(byte_ns, NEVER_NS, 0)
        try:
            short, long = _fastest(lambda: template.render(_CHAT[:1])), _fastest(lambda: template.render(_CHAT))
        except InvalidRequest:
            return cls(byte_ns, NEVER_NS, 0)
        message_ns = max(long - short, 0) / (len(_CHAT) - 1)
        if cache is None:
            return cls(byte_ns, short, message_ns)
        cache.encode(template.render(_LONG))
        known = _fastest(lambda: cache.complete(cache.look_up(template.render(_LONG))))
        return cls(byte_ns, short, message_ns, max(known - short, 0) / len(_LONG[0]["content"]))

    def of_text(self, text: str, limit_ns: float) -> float:
        """Estimate for tokenising; `NEVER_NS` for a text that is over the limit whatever it holds, which is not even
        looked at."""
        if len(text) * self.byte_ns > limit_ns:
            return NEVER_NS
        return len(text.encode("utf-8", "surrogatepass")) * self.byte_ns

    def of_chat(self, messages: Sequence[Mapping[str, Any]], limit_ns: float) -> float:
        """Estimate for rendering and tokenising a chat of plain texts; `NEVER_NS` for anything richer (parts, tool
        calls), whose size is not seen at a glance, and as for `of_text`."""
        return self._of_chat(messages, limit_ns, self.of_text)

    def of_known_chat(self, messages: Sequence[Mapping[str, Any]], limit_ns: float) -> float:
        """The same when all tokens are found in the cache."""
        return self._of_chat(messages, limit_ns, lambda text, _: len(text) * self.known_ns)

    def _of_chat(
        self, messages: Sequence[Mapping[str, Any]], limit_ns: float, of_text: Callable[[str, float], float]
    ) -> float:
        total = self.chat_ns + len(messages) * self.message_ns
        for message in messages:
            content = message.get("content")
            if total > limit_ns or not isinstance(content, str) or len(message) > 2:
                return NEVER_NS
            total += of_text(content, limit_ns)
        return total


def _fastest(work: Callable[[], object]) -> int:
    """ns of the fastest of some rounds: the others say what else the machine was doing."""
    times = []
    for _ in range(_ROUNDS):
        began = now_ns()
        work()
        times.append(now_ns() - began)
    return min(times)
