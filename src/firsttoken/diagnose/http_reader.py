"""The answer's bytes become status, headers and body; no socket here, so that stamps are taken before any parsing."""

from __future__ import annotations

import httptools


class HttpReader:
    """One HTTP/1.x answer. Feed it what comes; ``body`` is taken out by `take`."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self.keep_alive = False
        self.http_version = ""
        self._body: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    @property
    def has_headers(self) -> bool:
        return self.status >= 200

    def feed(self, data: bytes) -> None:
        """Raises `ValueError` for bytes that are not HTTP."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ValueError(str(error)) from None

    def end(self) -> None:
        """The server closed the connection: for an answer without a length that is its end."""
        if self.has_headers and "content-length" not in self.headers and "transfer-encoding" not in self.headers:
            self.complete = True

    def take(self) -> bytes:
        """The body since the last call."""
        body = b"".join(self._body)
        self._body.clear()
        return body

    # ---------------------------------------------------------------- what httptools calls

    def on_message_begin(self) -> None:
        self.headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.http_version = self._parser.get_http_version()
        self.keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.complete = self.has_headers  # not so for 100 Continue: the answer follows
