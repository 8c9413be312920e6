"""The chat at a real (pseudo) terminal, against a server that never stops talking."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


@pytest.fixture
def endless() -> Iterator[tuple[str, threading.Event]]:
    """Its address, and whether it has seen its caller leave."""
    left = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            try:
                while not left.is_set():
                    self.wfile.write(b'data: {"choices": [{"delta": {"content": "word "}}]}\n\n')
                    time.sleep(0.005)
            except OSError:
                left.set()

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}", left
    left.set()
    httpd.shutdown()
    httpd.server_close()


class Terminal:
    """A program whose controlling terminal is ours, so that a typed Ctrl-C arrives as SIGINT."""

    def __init__(self, *command: str) -> None:
        self._screen, inside = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            preexec_fn=_own_terminal,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
        )
        os.close(inside)
        self.text = ""

    def type(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def wait_for(self, words: str, seconds: float = 15) -> None:
        """Read until ``words`` came after what was waited for before."""
        end = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < end, f"{words!r} did not come, only {self.text[-500:]!r}"
            try:
                self.text += os.read(self._screen, 4096).decode(errors="replace")
            except OSError:  # the program ended
                assert words in self.text, f"ended without {words!r}: {self.text[-500:]!r}"
        self.text = self.text.partition(words)[2]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._screen)


def _own_terminal() -> None:
    import fcntl
    import signal
    import termios

    # A shell starts its background jobs with SIGINT ignored, and children inherit that; a user's terminal does not.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_keys_at_a_terminal(endless: tuple[str, threading.Event]) -> None:
    url, left = endless
    terminal = Terminal(sys.executable, "-m", "firsttoken.cli.main", "chat", "--url", url)
    try:
        terminal.wait_for("Ctrl-C stops an answer")
        terminal.wait_for("> ")
        terminal.type("talk\n")
        terminal.wait_for("word word word")
        terminal.type("\x03")
        terminal.wait_for("stopped")
        terminal.wait_for("> ")
        assert left.wait(5), "the server still believes in its caller"
        terminal.type("\x03")
        terminal.wait_for("/exit or Ctrl-D leaves")
        terminal.wait_for("> ")
        terminal.type("/history\n")
        terminal.wait_for("user: talk")
        terminal.wait_for("assistant: word word")
        terminal.wait_for("> ")  # a Ctrl-D typed before the prompt is read by nobody
        terminal.type("\x04")
        assert terminal.process.wait(10) == 0
    finally:
        terminal.close()
