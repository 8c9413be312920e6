"""What keeps the cached prefixes of API keys apart: a salt for each, with which the chains of its prompts begin.

A prompt's hash under its salt names files of the disk tier. So a salt must be the same after a restart; and whoever
gets hold of the files, and so of the prompts in them, must not find the keys by trying: they open the server. Hence
scrypt (RFC 7914), some 50 ms and 16 MiB for each guess of a key. It needs no secret file, which would be lost with a
container, differ between replicas, and lie beside the files that it protects.

Where nothing outlives the process, a keyed BLAKE2b under a key of this process is as good and takes a microsecond.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from firsttoken.server.config import ApiKey

# scrypt's costs: 128 * N * r bytes of memory, and time in proportion.
_N, _R, _P = 1 << 14, 8, 1
_MEMORY = 32 << 20
_PURPOSE = b"firsttoken/kv-salt/1"
_GROUP = "group/"


def cache_salts(keys: Sequence[ApiKey], *, lasting: bool) -> list[Future[str]]:
    """A salt for each of the keys, in their order; those of keys take their turn on a thread, where they take long.

    Keys of one ``cache_group`` have the same, and keys of one name have that of the first. ``lasting``: the same keys
    have the same salts in another process, and take the thread some 50 ms each.
    """
    derive = _slow if lasting else _quick()
    made: dict[str, Future[str]] = {}
    first: dict[str, str] = {}
    found = []
    for one in keys:
        if one.rule.cache_group:
            found.append(_known(f"{_GROUP}{one.rule.cache_group}"))
            continue
        owner = first.setdefault(one.name, one.key) if one.name else one.key
        if owner not in made:
            made[owner] = Future() if lasting else _known(derive(owner))
        found.append(made[owner])
    if lasting and made:
        for salt in made.values():
            salt.set_running_or_notify_cancel()  # who waits may give up, others wait for the same
        # It must not keep a process that ends from ending.
        threading.Thread(target=_make, args=(made,), name="firsttoken-salts", daemon=True).start()
    return found


def _make(wanted: dict[str, Future[str]]) -> None:
    for key, salt in wanted.items():
        try:
            salt.set_result(_slow(key))
        except Exception as error:
            salt.set_exception(error)


def _known(salt: str) -> Future[str]:
    future: Future[str] = Future()
    future.set_result(salt)
    return future


def _slow(key: str) -> str:
    return hashlib.scrypt(key.encode(), salt=_PURPOSE, n=_N, r=_R, p=_P, maxmem=_MEMORY, dklen=32).hex()


def _quick() -> Callable[[str], str]:
    secret = os.urandom(32)

    def keyed(key: str) -> str:
        return hashlib.blake2b(key.encode(), key=secret, person=b"kv-salt", digest_size=32).hexdigest()

    return keyed
