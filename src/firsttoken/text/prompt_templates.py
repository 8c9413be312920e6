"""The file of ``--prompt-templates``: beginnings of chats that are rendered and tokenised at the start.

JSON lines, each as the ``messages`` (and ``tools``, ``chat_template_kwargs``) of a chat request::

    {"messages": [{"role": "system", "content": "You are the clerk of ..."}]}

All callers find them, whatever their keys: it is the operator who says that they are no secret.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from firsttoken.core.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from firsttoken.text.chat_template import ChatTemplate


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """How chats begin; ``place`` is the file and line that say so."""

    place: str
    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any]

    def render(self, template: ChatTemplate, *more: dict[str, Any]) -> str:
        """The text of the chat so far and of ``more`` messages. Raises `ConfigError` when ``template`` refuses it."""
        try:
            return template.render(
                [*self.messages, *more],
                add_generation_prompt=False,
                tools=self.tools,
                template_kwargs=self.chat_template_kwargs,
            )
        except InvalidRequest as error:
            raise ConfigError(f"{self.place}: {error}") from None


def read_prompt_templates(path: str) -> tuple[PromptTemplate, ...]:
    """Raises `ConfigError` for a file that cannot be read and a line that is not such a chat."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read --prompt-templates {path}: {error.strerror}") from None
    found = tuple(_read(path, lines))
    if not found:
        raise ConfigError(
            f'--prompt-templates {path} is empty: write one {{"messages": [...]}} a line, or leave it out'
        )
    return found


def _read(path: str, lines: Sequence[bytes]) -> Iterator[PromptTemplate]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"--prompt-templates {path}, line {number}"
        try:
            given = msgspec.json.decode(line, type=_Line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{place}: {error}; expected an object like {{'messages': [...]}}") from None
        yield PromptTemplate(place, given.messages, given.tools, given.chat_template_kwargs)
