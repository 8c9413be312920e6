"""A serving process on the scripted engine, as a caller finds it."""

from __future__ import annotations

import http.client
import json
import re
import signal
import ssl
import subprocess
import sys
from pathlib import Path

STUB = Path(__file__).parents[1] / "server" / "stub_server.py"


class Server:
    """``trusted`` is how a caller of an https server knows it. With ``log_format`` "json" it logs as a server does that
    was started so, and the first lines that it wrote until it was ready are `records`."""

    def __init__(
        self, start_s: float = 0, trusted: ssl.SSLContext | None = None, log_format: str = "", **config
    ) -> None:
        command = [sys.executable, str(STUB), json.dumps({"port": 0, **config}), str(start_s), log_format]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "launching\n"
        self.trusted = trusted
        self.banner: list[str] = []
        if log_format == "json":
            self.records = [json.loads(self.process.stderr.readline())]
            self._find(self.records[0]["url"])
        elif not start_s:
            self._read_banner()

    def _read_banner(self) -> None:
        self.banner = []
        while not self.banner or (self.banner[-1] and " -d '" not in self.banner[-1]):
            self.banner.append(self.process.stdout.readline())
        self._find(self.banner[0])

    def _find(self, text: str) -> None:
        found = re.search(r"(https?://127\.0\.0\.1):(\d+)", text)
        assert found, (text, self.process.stderr.read())
        self.url, self.port = found.group(), int(found.group(2))

    def signal(self, number=signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ask(self, method: str, path: str, body: dict | None = None) -> http.client.HTTPResponse:
        if self.trusted is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        else:
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=10, context=self.trusted)
        connection.request(method, path, json.dumps(body) if body else None)
        return connection.getresponse()

    def stream(self, tokens: int) -> http.client.HTTPResponse:
        response = self.ask("POST", "/v1/completions", {"prompt": "hi", "max_tokens": tokens, "stream": True})
        assert response.readline().startswith(b"data: ")
        return response

    def said(self) -> str:
        """What it wrote to stderr; once, after its end."""
        return self.process.stderr.read()

    def wait(self, timeout: float) -> int:
        return self.process.wait(timeout)

    def end(self) -> None:
        """At once, however it is."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
