"""How a process ended, in words."""

from __future__ import annotations

import pytest

from firsttoken.transport.process_end import end_words


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, ""),
        (0, "its process ended with exit code 0"),
        (3, "its process ended with exit code 3"),
        (-9, "its process was killed by signal 9 (SIGKILL; out of memory?)"),
        (-11, "its process was killed by signal 11 (SIGSEGV)"),
        (-1000, "its process was killed by signal 1000 (no name)"),
    ],
)
def test_every_end_has_words(code, words):
    assert end_words(code) == words
