"""A shortest text of a regular expression, read off what it says: what a search byte by byte would have to guess, as
the letters that must come after ``.*``."""

from __future__ import annotations

import re

# Longer ones are of no use: no answer is brought to its end by so much.
MAX_EXAMPLE = 8192
_MAX_DEPTH = 100
# Of several characters that would do, the first of these that does.
_PREFERRED = "0aA-_ .!" + "".join(map(chr, range(33, 127))) + "é\n\t"
_SETS = {"d": "09", "w": "azAZ09__", "s": "  \t\r"}  # each pair is a range
_ONE = {"d": "0", "w": "a", "s": " ", "D": "a", "W": "-", "S": "a"}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_CODES = re.compile(
    r"x\{([0-9A-Fa-f]{1,6})\}|u\{([0-9A-Fa-f]{1,6})\}|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})"
)
_PROPERTIES = {"L": "a", "Ll": "a", "Lu": "A", "N": "0", "Nd": "0", "Alphabetic": "a", "Letter": "a"}
_PROPERTY = re.compile(r"p\{(\w+)\}|p(\w)")
_GROUP = re.compile(r"\?(?:P?<\w+>|[imsUu-]*:)")
_FLAGS = re.compile(r"\?[imsUu-]+\)")
_COUNT = re.compile(r"\{(\d{1,5})(?:,\d*)?\}")


class _Unread(Exception):
    """There is something in it that is not known here."""


def example(pattern: str) -> str | None:
    """A text that the whole ``pattern`` matches, short where that is easy to see; None where it is not told.

    Only a guess: what it is for is to be tried.
    """
    try:
        reader = _Reader(pattern)
        found = reader.alternatives(0)
        return found if reader.at == len(pattern) else None
    except (_Unread, IndexError):
        return None


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0

    def alternatives(self, depth: int) -> str:
        if depth > _MAX_DEPTH:
            raise _Unread
        best = self._sequence(depth)
        while self._next("|"):
            best = min(best, self._sequence(depth), key=len)
        return best

    def _sequence(self, depth: int) -> str:
        parts: list[str] = []
        size = 0
        while self.at < len(self._pattern) and self._pattern[self.at] not in "|)":
            parts.append(self._repeated(self._atom(depth)))
            size += len(parts[-1])
            if size > MAX_EXAMPLE:
                raise _Unread
        return "".join(parts)

    def _repeated(self, atom: str) -> str:
        while self.at < len(self._pattern):
            count = _COUNT.match(self._pattern, self.at)
            if count is not None:
                self.at = count.end()
                times = int(count[1])
            elif self._pattern[self.at] in "*?+":
                times = int(self._pattern[self.at] == "+")
                self.at += 1
            else:
                break
            self._next("?")  # lazy: matches the same
            if len(atom) * times > MAX_EXAMPLE:
                raise _Unread
            atom *= times
        return atom

    def _atom(self, depth: int) -> str:
        char = self._take()
        match char:
            case "^" | "$":
                return ""
            case ".":
                return "0"
            case "(":
                return self._group(depth)
            case "[":
                return self._class()
            case "\\":
                return self._escape()
            case _:
                return char

    def _group(self, depth: int) -> str:
        flags = _FLAGS.match(self._pattern, self.at)
        if flags is not None:
            self.at = flags.end()
            return ""
        opening = _GROUP.match(self._pattern, self.at)
        if opening is not None:
            self.at = opening.end()
        elif self._pattern[self.at] == "?":
            raise _Unread
        found = self.alternatives(depth + 1)
        if not self._next(")"):
            raise _Unread
        return found

    def _escape(self) -> str:
        if self._pattern[self.at] in "Az":
            self.at += 1
            return ""
        name = _PROPERTY.match(self._pattern, self.at)
        if name is not None:
            self.at = name.end()
            if (name[1] or name[2]) not in _PROPERTIES:
                raise _Unread
            return _PROPERTIES[name[1] or name[2]]
        if self._pattern[self.at] in _ONE:
            return _ONE[self._take()]
        return self._character()

    def _character(self) -> str:
        """Behind a backslash."""
        code = _CODES.match(self._pattern, self.at)
        if code is not None:
            self.at = code.end()
            try:
                return chr(int(code[code.lastindex or 0], 16))
            except (ValueError, OverflowError):
                raise _Unread from None
        char = self._take()
        if char.isalnum() and char not in _CONTROLS:
            raise _Unread
        return _CONTROLS.get(char, char)

    def _class(self) -> str:
        negated = self._next("^")
        ranges: list[tuple[str, str]] = []
        while not (self._pattern[self.at] == "]" and ranges):
            if self._pattern.startswith(("[", "&&", "--", "~~"), self.at):
                raise _Unread
            low = self._take()
            if low == "\\":
                pairs = _SETS.get(self._pattern[self.at])
                if pairs is not None:
                    self.at += 1
                    ranges += zip(pairs[::2], pairs[1::2], strict=True)
                    continue
                low = self._character()
            high = low
            if self._pattern[self.at] == "-" and self._pattern[self.at + 1] != "]":
                self.at += 1
                high = self._take()
                high = self._character() if high == "\\" else high
            ranges.append((low, high))
        self.at += 1
        fits = [char for char in _PREFERRED if any(low <= char <= high for low, high in ranges) != negated]
        if fits:
            return fits[0]
        if negated:
            raise _Unread
        return ranges[0][0]

    def _take(self) -> str:
        char = self._pattern[self.at]
        self.at += 1
        return char

    def _next(self, char: str) -> bool:
        """Whether it comes next; then it is taken."""
        if not self._pattern.startswith(char, self.at):
            return False
        self.at += 1
        return True
