"""What a model thinks before it answers, told apart from the answer as the text comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from firsttoken.text.pieces import Content, Piece, Reader, Reasoning

Thinks = Literal["no", "first", "on"]
"""Whether an answer begins with reasoning: it has none, it may open one first, it goes on with one that is open."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks what it thinks. ``always``: it thinks first even where it does not write the opening mark
    (DeepSeek R1), unless its prompt has closed it."""

    name: str
    always: bool = False
    opening: str = "<think>"
    closing: str = "</think>"

    def after(self, prompt: str, begun: str = "") -> Thinks:
        """What an answer does that follows ``prompt``; ``begun`` is what of the answer stands at its end."""
        if begun.strip():
            opened, closed = begun.rfind(self.opening), begun.rfind(self.closing)
            return "on" if opened > closed or (self.always and closed < 0) else "no"
        end = prompt[-64:].rstrip()
        if end.endswith(self.closing):
            return "no"
        return "on" if self.always or end.endswith(self.opening) else "first"


REASONING_FORMATS = {form.name: form for form in (ReasoningFormat("qwen3"), ReasoningFormat("deepseek_r1", True))}


class ReasoningReader:
    """A `Reader` of reasoning, with another for what follows it (None: that is content).

    Reasoning stands at the very start, between the marks, of which the first may be in the prompt (``inside``) or,
    there, be written once more. White space around the marks is neither's. Marks that stand elsewhere are content.
    """

    def __init__(self, form: ReasoningFormat, rest: Reader | None, *, inside: bool) -> None:
        self._opening, self._closing = form.opening, form.closing
        self._rest = rest
        self._text = ""  # not looked at yet
        self._space: list[str] = []  # held back: it is reasoning if reasoning follows
        self._inside = inside
        self._begun = False  # the opening mark, if there is one, has been seen
        self._over = False
        self._fresh = True  # nothing was said since the last mark

    @property
    def calls(self) -> int:
        return self._rest.calls if self._rest is not None else 0

    @property
    def complete(self) -> bool:
        return self._rest.complete if self._rest is not None else False

    @property
    def thought(self) -> bool:
        """There is reasoning."""
        return self._inside

    @property
    def over(self) -> bool:
        """What comes now is the answer."""
        return self._over

    def push(self, text: str) -> list[Piece]:
        if self._over:
            return self._answer(text)
        self._text += text
        return self._read(ended=False)

    def finish(self) -> list[Piece]:
        pieces = [] if self._over else self._read(ended=True)
        if self._rest is not None:
            pieces += self._rest.finish()
        return pieces

    def _read(self, *, ended: bool) -> list[Piece]:
        if not self._begun:
            start = self._text.lstrip()
            if not start and not ended:
                self._space.append(self._text)
                self._text = ""
                return []
            if not ended and self._opening.startswith(start) and start != self._opening:
                return []
            space, self._space = self._space, []
            if start.startswith(self._opening):
                self._text, self._inside = start[len(self._opening) :], True
            elif not self._inside:
                self._over, self._fresh = True, False
                text, self._text = "".join(space) + self._text, ""
                return self._answer(text)
            self._begun = True
        return self._think(ended=ended)

    def _think(self, *, ended: bool) -> list[Piece]:
        text = self._text.lstrip() if self._fresh else self._text
        end = text.find(self._closing)
        if end >= 0:
            self._text = ""
            pieces = self._reason(text[:end].rstrip())
            self._over, self._fresh = True, True
            return pieces + self._answer(text[end + len(self._closing) :])
        certain = text if ended else text[: len(text) - self._held(text)]
        said = certain if ended else certain.rstrip()
        pieces = self._reason(said)
        if len(said) < len(certain):
            self._space.append(certain[len(said) :])
        self._text = text[len(certain) :]
        return pieces

    def _reason(self, text: str) -> list[Piece]:
        """More reasoning, after the white space that was held back."""
        if not text:
            return []
        pieces: list[Piece] = [Reasoning("".join(self._space) + text)]
        self._space, self._fresh = [], False
        return pieces

    def _held(self, text: str) -> int:
        """Characters at the end of ``text`` that may begin the closing mark."""
        for size in range(min(len(self._closing) - 1, len(text)), 0, -1):
            if self._closing.startswith(text[-size:]):
                return size
        return 0

    def _answer(self, text: str) -> list[Piece]:
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        if self._rest is not None:
            return self._rest.push(text) if text else []
        return [Content(text)] if text else []
