"""Errors of requests that were put in chat's words, told in the words in which they came."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from firsttoken.core.errors import InvalidRequest
from firsttoken.server.errors import ApiError, as_api_error


@dataclass(frozen=True, slots=True)
class Name:
    """A field of chat as a pattern, and what it is called on another route."""

    chat: str
    here: str

    def told(self, text: str) -> str:
        """An error's message. A field whose name is a plain word is looked for at its beginning alone."""
        edge = r"(?<![\w.])" if re.search(r"\W|_", self.chat) else "^"
        return re.sub(rf"{edge}{self.chat}(?!\w)", self.here, text)

    def place(self, param: str) -> str | None:
        """An error's field, or one below it; None where it is another."""
        match = re.match(rf"{self.chat}(?=[.\[]|$)", param)
        return None if match is None else match.expand(self.here) + param[match.end() :]


@contextmanager
def renamed(names: Sequence[Name]) -> Iterator[None]:
    """What is wrong with a field of chat is said of the caller's own; of several names the first that fits counts."""
    try:
        yield
    except (ApiError, InvalidRequest) as raised:
        error = as_api_error(raised)
        for name in names:
            error.message = name.told(error.message)
        places = (name.place(error.param or "") for name in names)
        error.param = next((place for place in places if place is not None), error.param)
        raise error from None


@contextmanager
def advised(types: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Where a body has a type that is not known, the error says what is: each a place (a pattern), and what to tell."""
    try:
        yield
    except ApiError as error:
        for place, advice in types:
            if error.code == "invalid_type" and re.fullmatch(place, error.param or ""):
                error.message += f"; {advice}"
        raise
