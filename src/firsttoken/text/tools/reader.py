"""An answer's text as content and tool calls: the one streaming core under all ways of writing calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from firsttoken.text.pieces import CallArguments, CallStart, Content, Piece
from firsttoken.text.tools.cursor import Cursor, Steps


@dataclass(frozen=True, slots=True)
class Written:
    """How a model writes calls that are right: ``opening``, a call or several with ``separator`` between them, and
    ``closing``; a call is ``before``, the name, ``between``, the arguments and ``after``."""

    before: str
    between: str
    after: str = ""
    separator: str = ""
    opening: str = ""
    closing: str = ""


class ToolFormat(Protocol):
    """One way of writing tool calls."""

    @property
    def name(self) -> str: ...

    @property
    def triggers(self) -> tuple[str, ...]:
        """The texts that begin calls."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that are none of the caller's business where they are control tokens: what begins, divides and
        ends calls."""

    @property
    def bare(self) -> bool:
        """A call may also begin with a brace at the very start of an answer."""

    @property
    def written(self) -> Written: ...

    def read(self, reader: ToolReader) -> Steps[None]:
        """Read the calls that begin at the cursor, on the trigger or the brace. Where there is none, nothing is begun
        and the cursor may stay anywhere."""

    def new_id(self) -> str:
        """An id for a call, of a form that the model's template takes."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools that a caller offers: the parameters' JSON schema by name. ``parallel``: more than one call an answer
    may be made."""

    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    parallel: bool = True


class ToolReader:
    """A `Reader` of content and calls.

    What is no call of an offered tool is content, word for word, but for markers that are control tokens (``hidden``).
    White space before and after a call is neither's. A call begins as soon as its name and the start of its arguments
    are there; from then on its arguments are told as they come, and what breaks them off is content again.
    """

    def __init__(
        self,
        form: ToolFormat,
        offer: Offer,
        *,
        hidden: frozenset[str] = frozenset(),
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self.cursor = Cursor()
        self.calls = 0
        self.complete = False
        self.offer = offer
        self._form = form
        self._hidden = hidden
        self._new_id = new_id or form.new_id
        self._pieces: list[Piece] = []
        self._space: list[str] = []  # held back: it is content if content follows
        self._fresh = False  # nothing was said since the last call
        watched = sorted({*form.triggers, *hidden}, key=len, reverse=True)
        self._watched = re.compile("|".join(map(re.escape, watched)))
        self._beginnings = frozenset(text[:size] for text in watched for size in range(1, len(text)))
        self._first = re.compile("|".join({re.escape(text[0]) for text in watched}))
        self._longest = max(map(len, watched)) - 1
        self._steps = self._read()

    def push(self, text: str) -> list[Piece]:
        """What is now certain of the answer."""
        cursor = self.cursor
        cursor.text += text
        if text and not self.complete:
            next(self._steps, None)
        return self._told()

    def finish(self) -> list[Piece]:
        """What was held back. The reader is then spent."""
        self.cursor.ended = True
        if not self.complete:
            next(self._steps, None)
        return self._told()

    def _told(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    # ------------------------------------------------------------- for the formats

    def start(self, name: str) -> None:
        """A call of ``name`` is certain; its arguments follow."""
        self._pieces.append(CallStart(self.calls, self._new_id(), name))
        self.calls += 1

    def argue(self, text: str) -> None:
        """More of the latest call's arguments."""
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, CallArguments):
            self._pieces[-1] = CallArguments(last.index, last.text + text)
        else:
            self._pieces.append(CallArguments(self.calls - 1, text))

    @property
    def may_call(self) -> bool:
        """Another call may begin."""
        return not self.calls or self.offer.parallel

    # ---------------------------------------------------------------------- inside

    def _read(self) -> Steps[None]:
        cursor = self.cursor
        if self._form.bare:
            if (yield from cursor.skip_space()) == "{":
                yield from self._calls("")
            if not self.calls:
                cursor.at = 0
        while self.may_call and (trigger := (yield from self._content())) is not None:
            yield from self._calls(trigger)
        self.complete = not self.may_call

    def _calls(self, trigger: str) -> Steps[None]:
        """Read calls; where there are none, the trigger is content, and the text after it is looked at again."""
        cursor, before = self.cursor, self.calls
        start = cursor.at
        yield from self._form.read(self)
        if self.calls > before:
            self._space, self._fresh = [], True
            return
        cursor.at = start + len(trigger)
        if trigger not in self._hidden:
            self._say(trigger)

    def _content(self) -> Steps[str | None]:
        """Tell content up to the next trigger, at which the cursor then stands; None at the end of the text. White
        space is held back until it is known what stands behind it."""
        cursor = self.cursor
        while True:
            found = self._watched.search(cursor.text, cursor.at)
            end = len(cursor.text) if found is None else found.start()
            if found is None and not cursor.ended:
                end = self._certain(cursor.at)
            text = cursor.text[cursor.at : end]
            if self._fresh:
                text = text.lstrip()
            said = text.rstrip()
            self._say(said)
            if len(said) < len(text):
                self._space.append(text[len(said) :])
            cursor.at = end
            cursor.drop()
            if found is not None:
                if found.group() in self._form.triggers:
                    return found.group()
                cursor.at = len(found.group())  # a control token that stands alone
            elif not (yield from cursor.more()) and not cursor.text:
                self._tell(Content("".join(self._space)))
                return None

    def _certain(self, start: int) -> int:
        """The end of the text, or where a trigger may have begun that is not whole yet."""
        text = self.cursor.text
        if self._first.search(text, max(start, len(text) - self._longest)) is None:
            return len(text)
        for size in range(min(self._longest, len(text) - start), 0, -1):
            if text[-size:] in self._beginnings:
                return len(text) - size
        return len(text)

    def _say(self, text: str) -> None:
        """More content, after the white space that was held back."""
        if text:
            self._tell(Content("".join(self._space) + text))
            self._space, self._fresh = [], False

    def _tell(self, content: Content) -> None:
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, Content):
            self._pieces[-1] = Content(last.text + content.text)
        elif content.text:
            self._pieces.append(content)
