"""The readers of a conversation's answers: what is reasoning, what a tool call, what content."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from firsttoken.core.sampling_params import SamplingParams
from firsttoken.server.tools import ToolUse
from firsttoken.text.answer_formats import AnswerFormats
from firsttoken.text.pieces import Piece, Reader
from firsttoken.text.reasoning import ReasoningReader, Thinks
from firsttoken.text.tools.formats import NoCalls
from firsttoken.text.tools.reader import Offer, ToolReader

if TYPE_CHECKING:
    from firsttoken.frontend.generation import Delta
    from firsttoken.text.tokenizer import Tokenizer


class AnswerReaders:
    """One reader for each of ``params.n`` answers. ``shown`` are the control tokens that they must see as text."""

    def __init__(
        self,
        formats: AnswerFormats,
        params: SamplingParams,
        tools: ToolUse | None,
        tokenizer: Tokenizer,
        thinks: Thinks,
        begun: str,
    ) -> None:
        reasons = thinks != "no"
        marks = [formats.tool_marks] * (tools is not None) + [formats.reasoning_marks] * reasons
        self.shown = frozenset[int]().union(*(one.ids for one in marks))
        self._formats = formats
        self._hidden = (
            frozenset[str]().union(*(one.texts for one in marks)) if params.skip_special_tokens else frozenset()
        )
        self._tools = tools
        self._readers: list[Reader] = []
        self._thoughts: list[_Thought] = []
        for _ in range(params.n):
            reader = self._tool_reader(begun)
            if reasons:
                assert formats.reasoning is not None
                reader = thinking = ReasoningReader(formats.reasoning, reader, inside=thinks == "on")
                self._thoughts.append(_Thought(thinking, formats.reasoning.closing.encode(), tokenizer.token_bytes))
            assert reader is not None
            self._readers.append(reader)

    @classmethod
    def of(
        cls,
        formats: AnswerFormats,
        params: SamplingParams,
        tools: ToolUse | None,
        tokenizer: Tokenizer | None,
        thinks: Thinks,
        begun: str = "",
    ) -> AnswerReaders | None:
        """None where there is nothing but content to find in the answers. ``begun`` is what of a call stands at the end
        of the prompt."""
        if tokenizer is None or (tools is None and thinks == "no"):
            return None
        return cls(formats, params, tools, tokenizer, thinks, begun)

    @property
    def reasoning_tokens(self) -> int | None:
        """Of all answers so far, the marks among them; None where the model does not reason."""
        return sum(one.tokens for one in self._thoughts) if self._thoughts else None

    def read(self, delta: Delta) -> tuple[list[Piece], str | None]:
        """The pieces of a delta, and why its answer ends with it: "tool_calls" where it called some, also where nothing
        that may follow is of use, though the delta is not its last."""
        reader = self._readers[delta.index]
        pieces = reader.push(delta.text)
        if delta.finish_reason is not None:
            pieces += reader.finish()
        if self._thoughts:
            self._thoughts[delta.index].count(delta.token_ids)
        if reader.calls and (reader.complete or delta.finish_reason == "stop"):
            return pieces, "tool_calls"
        return pieces, delta.finish_reason

    def _tool_reader(self, begun: str) -> Reader | None:
        if self._tools is None or self._formats.tools is None:
            return ToolReader(NoCalls(), Offer(), hidden=self._hidden) if self._hidden else None
        reader = ToolReader(self._formats.tools, self._tools.offer(), hidden=self._hidden)
        reader.push(begun)  # there is nothing to tell of it yet
        return reader


class _Thought:
    """Counts the tokens of one answer's reasoning, up to the one with which the closing mark is complete. ``spell``
    gives a token's bytes."""

    def __init__(self, reader: ReasoningReader, closing: bytes, spell: Callable[[int], bytes]) -> None:
        self.tokens = 0
        self._reader = reader
        self._closing = closing
        self._spell = spell
        self._tail = b""  # the latest bytes: the mark may begin in them
        self._seen = 0
        self._done = False

    def count(self, token_ids: list[int]) -> None:
        """Take the tokens of the delta that the reader has just read."""
        if self._done:
            return
        for token in token_ids:
            self._seen += 1
            recent = self._tail + self._spell(token)
            if self._closing in recent:
                self._done = True
                break
            self._tail = recent[1 - len(self._closing) :]
        if self._reader.thought:
            self.tokens = self._seen
