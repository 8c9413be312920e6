"""The terminal side of ``firsttoken chat``: reads turns, streams answers, keeps the conversation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import IO, TextIO

from rich.console import Console

from firsttoken.cli.conversation import Message, Source
from firsttoken.core.errors import EngineDead, FirstTokenError

HELP = "/reset starts afresh, /history shows the talk, /exit or Ctrl-D leaves; Ctrl-C stops an answer"
PROMPT = "> "

# A model's text must not drive the terminal: all control characters but tab and newline go.
_CONTROL = dict.fromkeys(code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n")


class Chat:
    """One conversation. ``console`` shows it; with ``interactive`` it also shows prompts and figures."""

    def __init__(self, source: Source, console: Console, *, system: str | None, interactive: bool) -> None:
        self._source = source
        self._console = console
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._interactive = interactive
        self.messages: list[Message] = list(self._system)

    def run(self, read: Callable[[], str]) -> int:
        """Turn after turn until ``read`` raises ``EOFError``; returns the exit code.

        At a terminal a failed turn is reported and the talk goes on; from a pipe it ends with 1.
        """
        while True:
            try:
                text = read().strip()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                self._note("\n" + HELP)
                continue
            if text in ("/exit", "/quit"):
                return 0
            try:
                self._turn(text)
            except EngineDead:
                raise
            except FirstTokenError as error:
                if not self._interactive:
                    raise
                self._note(f"error: {error}")

    def _turn(self, text: str) -> None:
        if not text:
            return
        if not text.startswith("/"):
            self._answer(text)
        elif text == "/reset":
            self.messages = list(self._system)
            self._note("the conversation starts afresh")
        elif text == "/history":
            for message in self.messages:
                self._write(f"{message['role']}: {message['content']}\n")
        elif text == "/help":
            self._note(HELP)
        else:
            self._note(f"unknown command {text.split()[0]!r:.80}\n{HELP}")

    def _answer(self, text: str) -> None:
        asked: Message = {"role": "user", "content": text}
        parts: list[str] = []
        began = time.perf_counter()
        first = 0.0
        stopped = False
        stream = self._source.stream([*self.messages, asked])
        try:
            for piece in stream:
                if piece and not parts:
                    first = time.perf_counter() - began
                if piece:
                    parts.append(piece)
                    self._write(piece)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            stopped = True
        finally:
            _close(stream)
            self._write("\n")
        # What was said before Ctrl-C stays part of the conversation, as the user has read it.
        self.messages += [asked, {"role": "assistant", "content": "".join(parts)}]
        self._figures(first, time.perf_counter() - began, stopped=stopped)

    def _figures(self, first: float, total: float, *, stopped: bool) -> None:
        words = ["stopped"] if stopped else []
        if first:
            words.append(f"first token after {first * 1e3:.0f} ms")
        count = self._source.completion_tokens
        if count and not stopped:
            words.append(f"{count} tokens in {total:.2f} s")
            if count > 1 and total > first:
                words.append(f"{(count - 1) / (total - first):.0f} tokens/s")
        self._note(" · ".join(words))

    def _write(self, text: str) -> None:
        # Past rich, which would expand tabs and wrap words across pieces: the text goes out as the model wrote it.
        show(text, self._console.file)

    def _note(self, text: str) -> None:
        if self._interactive and text:
            self._console.print(text, style="dim", markup=False, highlight=False)


def show(text: str, terminal: IO[str]) -> None:
    """Write a model's text at once, without what would drive the terminal."""
    terminal.write(text.translate(_CONTROL))
    terminal.flush()


def _close(stream: Iterator[str]) -> None:
    close = getattr(stream, "close", None)
    if close is not None:
        close()


def terminal_reader() -> Callable[[], str]:
    """Reads a line at a terminal, with line editing and recall of earlier lines where readline exists."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # importing it is what turns editing on
    return lambda: input(PROMPT)


def pipe_reader(stdin: TextIO | None) -> Callable[[], str]:
    """Reads turns from a pipe, one a line; a closed stdin (None) has none."""

    def read() -> str:
        line = "" if stdin is None else stdin.readline()
        if not line:
            raise EOFError
        return line

    return read
