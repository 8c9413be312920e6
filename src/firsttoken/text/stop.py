"""Stop strings, found as the text arrives."""

from __future__ import annotations

from array import array
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopHit:
    """A stop string is complete: ``text`` is the last text to emit, ``stop`` the string that was found."""

    text: str
    stop: str


class StopScanner:
    """Looks for stop strings in a text that comes in pieces of any size, and holds back what may begin one.

    The match that *ends* first wins, as if the text came character by character, so the result does not depend on
    the pieces; of several that end together the longest wins, so that no part of a stop string is shown. With
    ``include`` the stop string itself is emitted too. Text is emitted as soon as no stop can begin in it.

    One Knuth-Morris-Pratt automaton a stop string, its failure table built only as far as matching has reached:
    time is linear in the text for each stop string, and nothing is spent on the length of a stop string itself.
    """

    __slots__ = ("_automata", "_firsts", "_held", "_include")

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        if "" in stops:
            raise ValueError("a stop string may not be empty")
        self._automata = [_Automaton(stop) for stop in dict.fromkeys(stops)]
        self._firsts = tuple({stop[0] for stop in stops})
        self._include = include
        self._held: _Automaton | None = None  # the held text is its matched prefix; None: nothing has matched

    def push(self, text: str) -> StopHit | str:
        """The text to emit now, or the hit that ends it. Nothing may be pushed after a hit."""
        if self.passes(text):
            return text
        before = self._held_text()
        end, hit = len(text) + 1, None
        for automaton in self._automata:
            found = automaton.feed(text)
            if found and (found < end or (found == end and hit is not None and len(automaton) > len(hit))):
                end, hit = found, automaton
        if hit is not None:
            shown = len(before) + end - (0 if self._include else len(hit))
            self._held = None
            return StopHit(_head(before, text, shown), hit.stop)
        held = max(self._automata, key=_matched)
        self._held = held if held.matched else None
        return _head(before, text, len(before) + len(text) - held.matched)

    def passes(self, text: str) -> bool:
        """Nothing is held back, and no stop string can begin in ``text``: it need not be pushed."""
        if self._held is not None:
            return False
        for first in self._firsts:  # noqa: SIM110  # any() with a generator takes three times as long
            if first in text:
                return False
        return True

    def finish(self) -> str:
        """The text still held back, when generation ended without a stop string."""
        held = self._held_text()
        self._held = None
        return held

    def _held_text(self) -> str:
        return self._held.stop[: self._held.matched] if self._held else ""


def _head(before: str, text: str, length: int) -> str:
    """The first ``length`` characters of ``before + text``."""
    return before[:length] if length <= len(before) else before + text[: length - len(before)]


def _matched(automaton: _Automaton) -> int:
    return automaton.matched


class _Automaton:
    """Invariant: ``matched`` is the length of the longest proper prefix of ``stop`` that ends the text so far."""

    __slots__ = ("_failure", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._failure = array("I", [0])  # failure[k - 1]: longest border of the first k characters

    def __len__(self) -> int:
        return len(self.stop)

    def feed(self, text: str) -> int:
        """Advance over ``text``; the position just behind the first match, or 0."""
        stop, matched, position = self.stop, self.matched, 0
        first, whole, length = stop[0], len(stop), len(text)
        while position < length:
            if not matched:
                position = text.find(first, position)
                if position < 0:
                    break
            character = text[position]
            while matched and stop[matched] != character:
                matched = self._border(matched)
            matched += stop[matched] == character
            position += 1
            if matched == whole:
                self.matched = 0
                return position
        self.matched = matched
        return 0

    def _border(self, length: int) -> int:
        failure, stop = self._failure, self.stop
        while len(failure) < length:
            at = len(failure)
            border = failure[at - 1]
            while border and stop[border] != stop[at]:
                border = failure[border - 1]
            failure.append(border + (stop[border] == stop[at]))
        return failure[length - 1]
