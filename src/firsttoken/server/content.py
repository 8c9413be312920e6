"""What one call said and was told, kept for the audit log."""

from __future__ import annotations

MAX_KEPT = 1 << 20
"""Bytes that are kept of a request, and of its answer."""


class Content:
    """The body as it came and the answer as it went, each cut at `MAX_KEPT` bytes."""

    __slots__ = ("_answer", "_request", "_size")

    def __init__(self) -> None:
        self._request = b""
        self._answer: list[bytes] = []
        self._size = 0  # of the answer

    def asked(self, body: bytes) -> None:
        self._request = body[: MAX_KEPT + 1]

    def told(self, data: bytes) -> None:
        if self._size <= MAX_KEPT:
            self._answer.append(data[: MAX_KEPT + 1 - self._size])
            self._size += len(self._answer[-1])

    @property
    def size(self) -> int:
        return len(self._request) + self._size

    @property
    def cut(self) -> bool:
        """Whether there was more."""
        return len(self._request) > MAX_KEPT or self._size > MAX_KEPT

    def texts(self) -> tuple[str, str]:
        """What was asked, and what was told."""
        answer = b"".join(self._answer)
        return self._request[:MAX_KEPT].decode("utf-8", "replace"), answer[:MAX_KEPT].decode("utf-8", "replace")
