"""What an answer is made of: pieces in the order in which they were said, the same whatever API tells them."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text for whoever asked."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """What a model thinks before it answers."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """A tool is called: the answer's call number ``index``. Its arguments follow."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the JSON text of the arguments of call ``index``."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


class Reader(Protocol):
    """Takes one answer's text as it comes. Whatever way the text is split over calls, the pieces say the same."""

    @property
    def calls(self) -> int:
        """The tool calls that have begun."""

    @property
    def complete(self) -> bool:
        """Nothing that may follow is of use: the answer can be ended here."""

    def push(self, text: str) -> list[Piece]:
        """What is now certain."""

    def finish(self) -> list[Piece]:
        """What was held back. The reader is then spent."""
