"""What a compiled grammar takes of memory, by the C library's own account.

The grammar's library does not say, and no size of a source tells: 39 bytes of JSON schema (a `multipleOf`) take 8 MB,
and 200 kB of descriptions 0.6. So what is allocated is read before and after it is compiled. Other threads allocate
meanwhile, and answers that are held to it add to it what they come to (0.1 MB as a rule, 6 MB seen, bounded by
`source.LIMITS`); so what is read is held between two bounds, and `GROWTH` is added.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

LEAST, MOST = 50_000, 40_000_000
GROWTH = 1_000_000
# Where the C library keeps no account.
_UNTOLD = 4_000_000

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Account(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


class Allocated:
    """From when it is made on. Any number at a time."""

    def __init__(self) -> None:
        self._before = _allocated()

    def taken(self) -> int:
        """Bytes that a grammar which has been compiled meanwhile takes, by which it is counted."""
        now = _allocated()
        taken = _UNTOLD if now is None or self._before is None else now - self._before
        return min(max(taken, LEAST) + GROWTH, MOST)


def _allocated() -> int | None:
    """Bytes that the process has of the C library, in some 10 us; None where it does not say (it is not glibc)."""
    library = _library()
    if library is None:
        return None
    account = library.mallinfo2()
    return int(account.uordblks + account.hblkhd)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _Account
    except (OSError, AttributeError):
        return None
    return library
