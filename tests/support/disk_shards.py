"""Shards for tests of the disk tier: chained keys, and KV bytes that follow from the key, so that wrong ones show."""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path

from firsttoken.core.identity import Identity
from firsttoken.kvcache.disk import DiskConfig, DiskStore, ShardMeta, aligned_buffer
from firsttoken.kvcache.eviction.interface import EvictionPolicy
from firsttoken.kvcache.prefix_index import hash_block

IDENTITY = Identity(model="model-a", kv_format="float32/2x2x8/16/0", salt="a tenant's secret salt")
OTHER_MODEL = Identity(model="model-b", kv_format="float32/2x2x8/16/0", salt="a tenant's secret salt")
BLOCK = 16
MIB = 1 << 20


def shard(
    number: int, parent: ShardMeta | None = None, *, num_tokens: int = 32, identity: Identity = IDENTITY
) -> ShardMeta:
    """The shard of tokens that follow from ``number``, after ``parent`` or at the root."""
    tokens = array("I", range(number * 1000, number * 1000 + num_tokens)).tobytes()
    before = parent.key if parent is not None else identity.root()
    key = before
    for begin in range(0, len(tokens), BLOCK * 4):
        key = hash_block(key, tokens[begin : begin + BLOCK * 4])
    return ShardMeta(key, before, parent.start + parent.num_tokens if parent is not None else 0, tokens)


def kv_bytes(meta: ShardMeta, nbytes: int) -> bytes:
    return hashlib.shake_128(meta.key).digest(nbytes)


def kv_buffer(meta: ShardMeta, nbytes: int) -> memoryview:
    """The same, aligned for O_DIRECT."""
    buffer = aligned_buffer(nbytes)
    buffer[:] = kv_bytes(meta, nbytes)
    return buffer


def open_store(
    folder: Path,
    identity: Identity = IDENTITY,
    *,
    cap_bytes: int = 64 * MIB,
    policy: EvictionPolicy | None = None,
    **options: object,
) -> DiskStore:
    """One that has looked through the folder."""
    given: dict[str, object] = {"margin_bytes": 0, "threads": 2, **options}
    store = DiskStore(DiskConfig(folder=folder, cap_bytes=cap_bytes, **given), identity, policy)  # type: ignore[arg-type]
    assert store.scanned(30)
    return store


def file_of(folder: Path, meta: ShardMeta) -> Path:
    return folder / "firsttoken-kv" / f"{meta.key.hex()}.kv"
