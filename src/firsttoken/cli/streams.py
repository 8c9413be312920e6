"""What the commands ask of stdin, stdout and stderr."""

from __future__ import annotations

from typing import TextIO


def is_terminal(stream: TextIO | None) -> bool:
    """False for a stream that was closed before Python began (``<&-``), which is None."""
    return stream is not None and stream.isatty()
