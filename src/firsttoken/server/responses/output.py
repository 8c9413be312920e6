"""The items of an answer, made of its pieces as they are said."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, assert_never

import msgspec

from firsttoken.server.encode import TokenNames, Told, to_json
from firsttoken.server.kept_logprobs import KeptLogprobs
from firsttoken.server.responses.schema import (
    FunctionCallItem,
    Item,
    MessageItem,
    ReasoningItem,
    ReasoningText,
    Status,
)
from firsttoken.text.pieces import CallArguments, CallStart, Content, Piece, Reasoning


class Probabilities:
    """The log-probabilities of a message's tokens."""

    __slots__ = ("_kept", "_names", "_top")

    def __init__(self, names: TokenNames, top: int) -> None:
        self._kept = KeptLogprobs(top)
        self._names = names
        self._top = top

    def add(self, told: Iterable[Told]) -> None:
        self._kept.add(told)

    def shown(self) -> Iterator[dict[str, Any]]:
        """For `encode.in_pieces`: four events tell all of them, and each makes them anew."""
        return self._names.chat(self._kept, self._top)


def new_id(prefix: str) -> str:
    """One that nobody can guess: where there are no API keys, whoever knows a response's id may read it."""
    return f"{prefix}_{secrets.token_hex(24)}"


@dataclass(slots=True)
class OutputItem(ABC):
    """One item, while it is being made; ``index`` is its place among all."""

    id: str
    index: int
    texts: list[str] = field(default_factory=list)
    status: Status = "in_progress"
    _encoded: msgspec.Raw | None = None

    @property
    def _long(self) -> bool:
        """More is told of it than its text."""
        return False

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def shown(self) -> dict[str, Any] | msgspec.Raw:
        """As far as it is made, for `encode.in_pieces`; encoded, once it is complete and where it is short."""
        if self.status == "in_progress" or self._long:
            return self._fields()
        if self._encoded is None:
            self._encoded = msgspec.Raw(to_json(self._fields()))
        return self._encoded

    @abstractmethod
    def _fields(self) -> dict[str, Any]: ...

    @abstractmethod
    def given_back(self) -> Item:
        """The item as a caller would send it back."""


class MessageOutput(OutputItem):
    """What was said. ``logprobs`` are those of its tokens, None where nobody asked."""

    __slots__ = ("logprobs",)

    def __init__(self, index: int, logprobs: Probabilities | None) -> None:
        super().__init__(new_id("msg"), index)
        self.logprobs = logprobs

    @property
    def _long(self) -> bool:
        return self.logprobs is not None

    def part(self) -> dict[str, Any]:
        """Its one part, for `encode.in_pieces`."""
        logprobs = [] if self.logprobs is None else self.logprobs.shown()
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": logprobs}

    def _fields(self) -> dict[str, Any]:
        content = [self.part()] if self.status != "in_progress" else []
        return {"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": content}

    def given_back(self) -> Item:
        return MessageItem(role="assistant", content=self.text)


class ReasoningOutput(OutputItem):
    """What was thought."""

    __slots__ = ()

    def __init__(self, index: int) -> None:
        super().__init__(new_id("rs"), index)

    def part(self) -> dict[str, Any]:
        """Its one part."""
        return {"type": "reasoning_text", "text": self.text}

    def _fields(self) -> dict[str, Any]:
        content = [self.part()] if self.status != "in_progress" else []
        return {"id": self.id, "type": "reasoning", "status": self.status, "summary": [], "content": content}

    def given_back(self) -> Item:
        return ReasoningItem(content=[ReasoningText(text=self.text)])


class CallOutput(OutputItem):
    """A function that is called; its texts are the arguments."""

    __slots__ = ("start",)

    def __init__(self, index: int, start: CallStart) -> None:
        super().__init__(new_id("fc"), index)
        self.start = start

    def _fields(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self.start.id,
            "name": self.start.name,
            "arguments": self.text,
        }

    def given_back(self) -> Item:
        return FunctionCallItem(call_id=self.start.id, name=self.start.name, arguments=self.text)


class Output:
    """All items of one answer, of which the last may still be open. ``logprobs`` makes that in which a message keeps
    those of its tokens, None where nobody asked."""

    def __init__(self, logprobs: Callable[[], Probabilities | None]) -> None:
        self.items: list[OutputItem] = []
        self.open: OutputItem | None = None
        self._logprobs = logprobs

    def take(self, piece: Piece) -> OutputItem | None:
        """The piece goes to the open item. Where it opens another, that is `open` now, and the one before is given,
        if there was one; otherwise None."""
        before = self.open
        match piece:
            case Content(text):
                if not isinstance(before, MessageOutput):
                    self._begin(MessageOutput(len(self.items), self._logprobs()))
            case Reasoning(text):
                if not isinstance(before, ReasoningOutput):
                    self._begin(ReasoningOutput(len(self.items)))
            case CallStart():
                text = ""
                self._begin(CallOutput(len(self.items), piece))
            case CallArguments(_, text):
                assert isinstance(before, CallOutput)  # a call's arguments follow its start
            case _:
                assert_never(piece)
        now = self.open
        assert now is not None
        if text:
            now.texts.append(text)
        if now is before or before is None:
            return None
        before.status = "completed"
        return before

    def note(self, logprobs: Iterable[Told]) -> None:
        """Those of the tokens of an open message, where somebody asked."""
        if isinstance(self.open, MessageOutput) and self.open.logprobs is not None:
            self.open.logprobs.add(logprobs)

    def end(self, *, complete: bool, logprobs: Iterable[Told]) -> OutputItem:
        """The answer ends; the item that was open is given: an empty message where nothing was said at all.
        ``logprobs``: those of tokens without a text, as the end token is."""
        if self.open is None:
            self._begin(MessageOutput(0, self._logprobs()))
        self.note(logprobs)
        last = self.open
        assert last is not None
        last.status = "completed" if complete else "incomplete"
        self.open = None
        return last

    def shown(self) -> list[Any]:
        return [item.shown() for item in self.items]

    def given_back(self) -> list[Item]:
        """The items as a caller would send them back."""
        return [item.given_back() for item in self.items]

    def _begin(self, item: OutputItem) -> None:
        self.items.append(item)
        self.open = item
