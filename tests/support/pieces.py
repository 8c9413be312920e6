"""Read texts with a reader, in any pieces, and tell what came of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from firsttoken.text.pieces import CallArguments, CallStart, Content, Piece, Reader, Reasoning


@dataclass
class Heard:
    """An answer, put together from its pieces. ``calls`` are (id, name, arguments)."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Content(text):
                    assert text
                    self.content += text
                case Reasoning(text):
                    assert text
                    self.reasoning += text
                case CallStart(index, id_, name):
                    assert index == len(self.calls)
                    self.calls.append((id_, name, ""))
                case CallArguments(index, text):
                    assert index == len(self.calls) - 1
                    id_, name, arguments = self.calls[index]
                    self.calls[index] = (id_, name, arguments + text)

    @property
    def named(self) -> list[tuple[str, str]]:
        return [(name, arguments) for _, name, arguments in self.calls]


def hear(reader: Reader, parts: Iterable[str]) -> Heard:
    heard = Heard()
    for part in parts:
        heard.add(reader.push(part))
    heard.add(reader.finish())
    assert reader.calls == len(heard.calls)
    return heard


def same_for_every_split(make: Callable[[], Reader], text: str, *, tries: int = 30, seed: int = 1) -> Heard:
    """What is read of ``text`` at once, after the same came out of it character by character and in random pieces."""
    whole = hear(make(), [text])
    assert hear(make(), text) == whole
    chance = random.Random(seed)
    for _ in range(tries):
        cuts = sorted(chance.randint(0, len(text)) for _ in range(chance.randint(1, 8)))
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert hear(make(), parts) == whole, parts
    return whole
