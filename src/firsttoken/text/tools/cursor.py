"""A place in a text that is still coming. Its methods are generators: each waits (yields) where it must see more.

What they decide depends on the text alone, never on where it was cut into pieces: a reader written with them gives
the same for every split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

_SPACE = " \t\r\n"
_IN_STRING = re.compile(r'["\\]')
# What is not a blank, a comma, a colon or in a number or literal: structure, or what has no place in JSON.
_OUTSIDE = re.compile(r"[^\s,:0-9+\-.eEtrufalsn]")
_SCALAR = re.compile(r"[^\s,\]}]+")
_CLOSES = {"{": "}", "[": "]"}
# Characters of a name or a key, and of any other value that is held back until it is whole: a text that never
# becomes a call must not be read again and again.
_MAX_STRING = 512
_MAX_HELD = 16384


class Cursor:
    """``text[at:]`` is what has not been read. After ``ended`` nothing more comes."""

    __slots__ = ("at", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def more(self) -> Steps[bool]:
        """Wait for text beyond what is here; False at the end."""
        size = len(self.text)
        while len(self.text) == size:
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """The next character, "" at the end."""
        while self.at >= len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def skip_space(self) -> Steps[str]:
        """The next character that is not white space, as `peek`."""
        while True:
            while self.at < len(self.text):
                if self.text[self.at] not in _SPACE:
                    return self.text[self.at]
                self.at += 1
            if not (yield from self.more()):
                return ""

    def take(self, literal: str) -> Steps[bool]:
        """Step over ``literal``; False, and no step, where something else stands."""
        while True:
            have = self.text[self.at : self.at + len(literal)]
            if have == literal:
                self.at += len(literal)
                return True
            if not literal.startswith(have) or not (yield from self.more()):
                return False

    def match(self, pattern: re.Pattern[str], longest: int) -> Steps[str]:
        """Step over what ``pattern`` matches, at most ``longest`` characters and known to be whole; "" for nothing."""
        while True:
            found = pattern.match(self.text, self.at, self.at + longest)
            size = found.end() - self.at if found else 0
            if size == len(self.text) - self.at < longest and (yield from self.more()):
                continue
            self.at += size
            return found.group() if found else ""

    def string(self) -> Steps[str | None]:
        """Step over a JSON string, not a long one; None, and no step, where none stands."""
        start = self.at
        if (yield from self.peek()) == '"':
            end = yield from self._string_end(start + 1, start + _MAX_STRING)
            if end:
                try:
                    value = json.loads(self.text[start:end])
                except ValueError:
                    return None
                self.at = end
                return str(value)
        return None

    def value(self) -> Steps[str | None]:
        """Step over a JSON value, not a very long one; its text, or None where its end does not come."""
        first = yield from self.peek()
        start = self.at
        if first in ("{", "["):
            if not (yield from self.brackets(_nobody, limit=start + _MAX_HELD)):
                return None
        elif first == '"':
            self.at = (yield from self._string_end(start + 1, start + _MAX_HELD)) or start
        else:
            yield from self.match(_SCALAR, _MAX_STRING)
        return self.text[start : self.at] if start < self.at <= start + _MAX_HELD else None

    def brackets(self, emit: Callable[[str], None], limit: int = 0) -> Steps[bool]:
        """Step over an object or array and hand out its text as it comes, up to the bracket that closes it; False
        where a wrong one stands, or what is no JSON, which is not stepped over, and where the text ends. What was
        handed out is dropped, and no place before it can be gone back to; with a ``limit`` it is kept, and False where
        it goes on beyond."""
        wanted: list[str] = []
        position = self.at
        while True:
            found = _OUTSIDE.search(self.text, position)
            if found is None:
                position = self._hand_out(len(self.text), emit, limit)
                if 0 < limit < position or not (yield from self.more()):
                    return False
                continue
            position, mark = found.end(), found.group()
            if 0 < limit < position:
                return False
            if mark == '"':
                position = yield from self._string(position, emit, limit)
                if not position:
                    return False
            elif mark in _CLOSES:
                wanted.append(_CLOSES[mark])
            elif mark != wanted[-1]:
                self._hand_out(found.start(), emit, limit)
                return False
            else:
                wanted.pop()
            if not wanted:
                self._hand_out(position, emit, limit)
                return True

    def _string(self, position: int, emit: Callable[[str], None], limit: int) -> Steps[int]:
        """Behind the closing quote of the string in which ``position`` lies, handed out as it comes; 0 without one."""
        while True:
            found = _IN_STRING.search(self.text, position)
            if found is not None and found.group() == '"':
                return found.end()
            if found is not None and found.end() < len(self.text):
                position = found.end() + 1  # what is escaped
                continue
            # A lone backslash at the end stays, so that what it escapes is looked at together with it.
            position = self._hand_out(found.start() if found else len(self.text), emit, limit)
            if 0 < limit < position or not (yield from self.more()):
                self._hand_out(len(self.text), emit, limit)
                return 0

    def _string_end(self, position: int, limit: int) -> Steps[int]:
        """Behind the closing quote of the string in which ``position`` lies; 0 where it has no end before ``limit``."""
        while True:
            found = _IN_STRING.search(self.text, position, limit)
            if found is not None and found.group() == '"':
                return found.end()
            if found is not None and found.end() < len(self.text):
                position = found.end() + 1
                continue
            position = found.start() if found else len(self.text)
            if position >= limit or not (yield from self.more()):
                return 0

    def until(self, literal: str) -> Steps[str | None]:
        """Step over everything up to ``literal``, and over it; what stood before, or None where it never comes."""
        start = position = self.at
        while True:
            found = self.text.find(literal, position)
            if found >= 0:
                self.at = found + len(literal)
                return self.text[start:found]
            position = max(start, len(self.text) - len(literal) + 1)
            if not (yield from self.more()):
                return None

    def drop(self) -> None:
        """Forget what was read: nobody goes back there."""
        self.text = self.text[self.at :]
        self.at = 0

    def _hand_out(self, end: int, emit: Callable[[str], None], limit: int) -> int:
        """What lies before ``end``; returns where that is now."""
        if end > self.at:
            emit(self.text[self.at : end])
            self.at = end
        if not limit:
            self.drop()
        return self.at


def _nobody(_: str) -> None:
    """Who wants nothing as it comes."""
