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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from firsttoken.server.config import ApiKey

# scrypt's costs: 128 * N * r bytes of memory, and time in proportion.
_N, _R, _P = 1 << 14, 8, 1
_MEMORY = 32 << 20
_PURPOSE = b"firsttoken/kv-salt/1"
_GROUP = "group/"


def cache_salts(keys: Sequence[ApiKey], *, lasting: bool) -> list[str]:
    """A salt for each of the keys, in their order.

    Keys of one ``cache_group`` have the same, and keys of one name have that of the first. ``lasting``: the same keys
    have the same salts in another process, and they take 50 ms of a processor each.
    """
    groups = [f"{_GROUP}{one.rule.cache_group}" if one.rule.cache_group else "" for one in keys]
    first: dict[str, str] = {}
    owners = [first.setdefault(one.name, one.key) if one.name else one.key for one in keys]
    made = _made({owner for owner, group in zip(owners, groups, strict=True) if not group}, _derivation(lasting))
    return [group or made[owner] for owner, group in zip(owners, groups, strict=True)]


def _derivation(lasting: bool) -> Callable[[str], str]:
    if lasting:
        return _slow
    secret = os.urandom(32)

    def keyed(key: str) -> str:
        return hashlib.blake2b(key.encode(), key=secret, person=b"kv-salt", digest_size=32).hexdigest()

    return keyed


def _slow(key: str) -> str:
    return hashlib.scrypt(key.encode(), salt=_PURPOSE, n=_N, r=_R, p=_P, maxmem=_MEMORY, dklen=32).hex()


def _made(keys: set[str], derive: Callable[[str], str]) -> dict[str, str]:
    if derive is not _slow or len(keys) < 2:
        return {key: derive(key) for key in keys}
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # scrypt leaves the interpreter to others
        ordered = sorted(keys)
        return dict(zip(ordered, pool.map(derive, ordered), strict=True))
