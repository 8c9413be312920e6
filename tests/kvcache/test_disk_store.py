"""The disk tier when nothing goes wrong: what is put is found, read back, within the cap, and there after a restart."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest

from firsttoken.core.identity import Identity
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.disk import DiskConfig, DiskStore, Outcome, ShardMeta, aligned_buffer, files
from firsttoken.kvcache.disk.format import Header, encode
from tests.support.disk_shards import IDENTITY, MIB, file_of, kv_buffer, kv_bytes, open_store, shard

SIZE = 3 * 4096 + 100
FILE = 4096 + SIZE


def put(store: DiskStore, meta: ShardMeta, nbytes: int = SIZE) -> Outcome | None:
    return store.put(meta, kv_buffer(meta, nbytes)).wait(30)


def get(store: DiskStore, meta: ShardMeta, nbytes: int = SIZE) -> Outcome | None:
    """The outcome; done only with the right bytes."""
    into = aligned_buffer(nbytes)
    outcome = store.get(meta, into).wait(30)
    assert outcome is not Outcome.DONE or into == kv_bytes(meta, nbytes)
    return outcome


def test_what_is_put_comes_back(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = shard(1)
    second = shard(2, first)
    assert not store.contains(first.key)
    assert get(store, first) is Outcome.ABSENT
    assert put(store, first) is Outcome.DONE
    assert put(store, second) is Outcome.DONE
    assert store.contains(first.key)
    assert store.span(second.key) == (32, 32)
    assert get(store, first) is Outcome.DONE
    assert get(store, second) is Outcome.DONE
    stats = store.stats()
    assert (stats.files, stats.nbytes, stats.stored, stats.hits) == (2, 2 * FILE, 2, 2)
    assert stats.misses == {"absent": 1}
    assert stats.read_bytes == stats.written_bytes == 2 * FILE
    assert stats.read_gb_s is not None
    assert stats.read_gb_s > 0
    assert stats.first_byte_ms is not None
    assert stats.first_byte_ms > 0
    store.check()
    store.close()


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 9 * MIB, 9 * MIB + 1])
@pytest.mark.parametrize("direct", [True, False])
def test_both_ways_to_the_disk_make_and_read_the_same_file(tmp_path: Path, nbytes: int, direct: bool) -> None:
    """Written one way and read the other; the file is the one that the format says."""
    meta = shard(1, num_tokens=1600)
    with_direct = open_store(tmp_path, direct=direct)
    assert put(with_direct, meta, nbytes) is Outcome.DONE
    with_direct.close()
    raw = file_of(tmp_path, meta).read_bytes()
    assert meta.header_bytes == 8192
    crc = files.zlib.crc32(kv_bytes(meta, nbytes))
    assert raw == encode(Header(meta, IDENTITY.salted_root(""), nbytes, crc)) + kv_bytes(meta, nbytes)
    other = open_store(tmp_path, direct=not direct)
    assert get(other, meta, nbytes) is Outcome.DONE
    other.close()


def test_direct_is_used_for_aligned_buffers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    if not store.stats().direct:
        pytest.skip("this file system has no O_DIRECT")
    flags: list[bool] = []
    real_open = os.open

    def watching(path: object, flag: int, *rest: int) -> int:
        if str(path).endswith((".kv", ".tmp")):
            flags.append(bool(flag & os.O_DIRECT))
        return real_open(path, flag, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(files.os, "open", watching)
    aligned, crooked = shard(1), shard(2)
    memory = aligned_buffer(SIZE + 1)
    memory[1:] = kv_bytes(crooked, SIZE)
    assert put(store, aligned) is Outcome.DONE
    assert store.put(crooked, memory[1:]).wait(30) is Outcome.DONE
    assert get(store, aligned) is Outcome.DONE
    assert store.get(aligned, memory[1:]).wait(30) is Outcome.DONE
    assert memory[1:] == kv_bytes(aligned, SIZE)
    assert flags == [True, False, True, False]
    store.close()


@pytest.mark.parametrize("sizes", [[4096, 8192, 4096], [4096, 100], [100, 4096], [5 * MIB, 4096], [1] * 1200])
def test_blocks_need_not_lie_side_by_side(tmp_path: Path, sizes: list[int]) -> None:
    store = open_store(tmp_path)
    meta = shard(1)
    whole = kv_bytes(meta, sum(sizes))
    ends = np.cumsum(sizes)
    pieces = [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    assert store.put(meta, pieces).wait(30) is Outcome.DONE
    assert get(store, meta, len(whole)) is Outcome.DONE
    into = [aligned_buffer(size) for size in sizes]
    assert store.get(meta, into).wait(30) is Outcome.DONE
    assert b"".join(into) == whole
    store.close()


def test_a_buffer_must_be_one(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(ValueError, match="empty"):
        store.put(shard(1), b"")
    with pytest.raises(ValueError, match="contiguous"):
        store.put(shard(1), memoryview(np.zeros(8, np.uint8))[::2])
    with pytest.raises(ValueError, match="writable"):
        store.get(shard(1), b"1234")
    with pytest.raises(ValueError, match="32 bytes, got 3"):
        ShardMeta(b"key", bytes(32), 0, bytes(4))
    with pytest.raises(ValueError, match="got 6 bytes"):
        ShardMeta(bytes(32), bytes(32), 0, bytes(6))
    store.close()


# ------------------------------------------------- cap and policy


def test_the_cap_holds_at_every_moment(tmp_path: Path) -> None:
    cap = MIB
    store = open_store(tmp_path, cap_bytes=cap, threads=4)
    most = 0
    handles = [store.put(meta, kv_buffer(meta, SIZE)) for meta in map(shard, range(60))]
    handles += [store.put(shard(100 + number), kv_buffer(shard(100 + number), 200_000)) for number in range(4)]
    while not all(handle.done() for handle in handles):
        most = max(most, on_disk(tmp_path))
    assert most <= cap
    assert all(handle.ok for handle in handles)
    for number in range(200, 500):
        assert put(store, shard(number)) is Outcome.DONE
        assert on_disk(tmp_path) <= cap
    stats = store.stats()
    assert stats.nbytes == on_disk(tmp_path)
    assert stats.nbytes > cap - 2 * FILE  # and it is used
    assert stats.evicted == stats.stored - stats.files
    store.check()
    store.close()


def on_disk(folder: Path) -> int:
    total = 0
    for path in (folder / "firsttoken-kv").iterdir():
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def test_the_least_recently_used_goes_first_and_leaves_before_what_they_continue(tmp_path: Path) -> None:
    store = open_store(tmp_path, cap_bytes=MIB)
    size = MIB // 4 - 4096
    root = shard(1)
    leaf = shard(2, root)
    alone, last = shard(3), shard(4)
    for meta in (root, leaf, alone, last):
        assert put(store, meta, size) is Outcome.DONE
    assert get(store, leaf, size) is Outcome.DONE
    assert put(store, shard(5), size) is Outcome.DONE
    assert not store.contains(alone.key)  # the oldest but for root, which leaf continues
    assert put(store, last, size) is Outcome.DONE  # stored already: that is a use
    assert put(store, shard(6), size) is Outcome.DONE
    assert not store.contains(leaf.key)
    assert store.contains(root.key)
    assert put(store, shard(7), size) is Outcome.DONE
    assert not store.contains(root.key)
    assert store.stats().already_stored == 1
    store.check()
    store.close()


def test_what_is_larger_than_the_cap_is_refused_and_costs_nobody_a_place(tmp_path: Path) -> None:
    store = open_store(tmp_path, cap_bytes=MIB)
    assert put(store, shard(1)) is Outcome.DONE
    assert put(store, shard(2), MIB) is Outcome.TOO_LARGE
    assert store.contains(shard(1).key)
    assert store.stats().refused == {"too_large": 1}
    store.close()


def test_others_space_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the margin it gives way, a few shards a put, and stores nothing."""
    store = open_store(tmp_path, margin_bytes=100 * MIB)
    monkeypatch.setattr(store._folder, "free_bytes", lambda: 101 * MIB)
    for number in range(10):
        assert put(store, shard(number)) is Outcome.DONE
    monkeypatch.setattr(store._folder, "free_bytes", lambda: 100 * MIB)
    assert put(store, shard(10)) is Outcome.NO_SPACE
    assert store.stats().files == 8
    store.check()
    store.close()


# ------------------------------------------------- restart


def test_it_is_warm_after_a_restart_in_the_order_of_use(tmp_path: Path) -> None:
    size = MIB // 4 - 4096
    metas = [shard(number) for number in range(4)]
    store = open_store(tmp_path, cap_bytes=MIB)
    for age, meta in enumerate(metas):
        assert put(store, meta, size) is Outcome.DONE
        os.utime(file_of(tmp_path, meta), (0, 1_000_000 + age))
    assert get(store, metas[0], size) is Outcome.DONE  # so it is the youngest, and its file says so
    store.close()
    store = open_store(tmp_path, cap_bytes=MIB)
    assert all(store.contains(meta.key) for meta in metas)
    assert store.span(metas[2].key) == (0, 32)
    assert put(store, shard(9), size) is Outcome.DONE
    assert [store.contains(meta.key) for meta in metas] == [True, False, True, True]
    assert all(get(store, metas[n], size) is Outcome.DONE for n in (0, 2, 3))
    store.check()
    store.close()


def test_a_smaller_cap_is_kept_from_the_start(tmp_path: Path) -> None:
    store = open_store(tmp_path, cap_bytes=64 * MIB)
    for number in range(5):
        assert put(store, shard(number), MIB // 2) is Outcome.DONE
    store.close()
    store = open_store(tmp_path, cap_bytes=MIB)
    assert store.stats().files == 1
    assert on_disk(tmp_path) <= MIB
    store.close()


def test_while_it_looks_through_the_folder_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    assert put(store, shard(1)) is Outcome.DONE
    store.close()
    go_on = threading.Event()
    real = files.read_header
    monkeypatch.setattr("firsttoken.kvcache.disk.shelf.read_header", lambda *given: go_on.wait(30) and real(*given))
    store = DiskStore(DiskConfig(folder=tmp_path, cap_bytes=64 * MIB, margin_bytes=0), IDENTITY)
    assert not store.scanned(0)
    assert not store.contains(shard(1).key)
    assert get(store, shard(1)) is Outcome.DONE
    assert get(store, shard(2)) is Outcome.ABSENT
    assert put(store, shard(2)) is Outcome.DONE
    assert store.stats().scan_s is None
    go_on.set()
    assert store.scanned(30)
    assert store.contains(shard(1).key)
    assert store.stats().files == 2
    store.check()
    store.close()


# ------------------------------------------------- privacy


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o300])
def test_nobody_else_may_look_and_no_salt_is_written(tmp_path: Path, mode: int) -> None:
    (tmp_path / "firsttoken-kv").mkdir()
    (tmp_path / "firsttoken-kv").chmod(mode)
    store = open_store(tmp_path)
    meta = shard(1)
    assert put(store, meta) is Outcome.DONE
    assert stat.S_IMODE((tmp_path / "firsttoken-kv").stat().st_mode) == 0o700
    paths = list((tmp_path / "firsttoken-kv").iterdir())
    assert len(paths) == 2  # the lock, and the shard
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert b"secret" not in path.read_bytes()
    store.close()


def test_tenants_do_not_meet(tmp_path: Path) -> None:
    """Another salt, another key: the same tokens are not found."""
    store = open_store(tmp_path)
    assert put(store, shard(1)) is Outcome.DONE
    other = shard(1, identity=Identity(model="model-a", kv_format="float32/2x2x8/16/0", salt="another"))
    assert get(store, other) is Outcome.ABSENT
    store.close()


# ------------------------------------------------- drop, refusals, close


def test_a_dropped_shard_is_gone_at_once_and_its_file_soon(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert put(store, shard(1)) is Outcome.DONE
    store.drop(shard(1).key)
    store.drop(shard(2).key)
    assert not store.contains(shard(1).key)
    assert get(store, shard(1)) is Outcome.ABSENT
    store.close()
    assert not file_of(tmp_path, shard(1)).exists()


def test_a_write_that_is_dropped_meanwhile_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    begun, go_on = threading.Event(), threading.Event()
    real = os.pwritev

    def slow(*given: object) -> int:
        begun.set()
        go_on.wait(30)
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(files.os, "pwritev", slow)
    handle = store.put(shard(1), kv_buffer(shard(1), SIZE))
    assert begun.wait(30)
    assert get(store, shard(1)) is Outcome.ABSENT  # half a file is no file
    store.drop(shard(1).key)
    go_on.set()
    assert handle.wait(30) is Outcome.DROPPED
    assert not store.contains(shard(1).key)
    assert store.stats().nbytes == 0
    assert put(store, shard(1)) is Outcome.DONE
    store.check()
    store.close()


def test_writers_that_are_behind_refuse_and_reads_pass_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path, threads=2, max_writes=3, max_reads=1)
    assert put(store, shard(0)) is Outcome.DONE
    go_on = threading.Event()
    real = os.pwritev
    monkeypatch.setattr(files.os, "pwritev", lambda *given: go_on.wait(60) and real(*given))
    handles = [store.put(meta, kv_buffer(meta, SIZE)) for meta in map(shard, range(1, 6))]
    assert [handle.outcome for handle in handles[3:]] == [Outcome.QUEUE_FULL] * 2
    assert store.put(shard(1), kv_buffer(shard(1), SIZE)) is handles[0]
    assert store.stats().pending_writes == 3
    assert store.stats().pending_write_bytes == 3 * FILE
    threading.Event().wait(0.3)  # whoever would take a write has taken one
    assert store.get(shard(0), aligned_buffer(SIZE)).wait(10) is Outcome.DONE  # one thread never writes
    go_on.set()
    assert [handle.wait(30) for handle in handles[:3]] == [Outcome.DONE] * 3
    assert store.stats().refused == {"queue_full": 2}

    held = threading.Event()
    real_read = os.preadv
    monkeypatch.setattr(files.os, "preadv", lambda *given: held.wait(30) and real_read(*given))
    first = store.get(shard(0), aligned_buffer(SIZE))
    assert get(store, shard(1)) is Outcome.QUEUE_FULL
    held.set()
    assert first.wait(30) is Outcome.DONE
    store.check()
    store.close()


def test_what_is_read_is_not_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path, cap_bytes=MIB)
    size = MIB - 8192
    assert put(store, shard(1), size) is Outcome.DONE
    held = threading.Event()
    real_read = os.preadv
    monkeypatch.setattr(files.os, "preadv", lambda *given: held.wait(30) and real_read(*given))
    into = aligned_buffer(size)
    reading = store.get(shard(1), into)
    assert put(store, shard(2), size) is Outcome.NO_SPACE
    held.set()
    assert reading.wait(30) is Outcome.DONE
    assert into == kv_bytes(shard(1), size)
    assert put(store, shard(2), size) is Outcome.DONE
    store.check()
    store.close()


def test_after_close_everything_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path, threads=1)
    assert put(store, shard(1)) is Outcome.DONE
    real = os.pwritev
    begun = threading.Event()
    go_on = threading.Event()
    monkeypatch.setattr(files.os, "pwritev", lambda *given: (begun.set(), go_on.wait(30), real(*given))[-1])
    running = store.put(shard(2), kv_buffer(shard(2), SIZE))
    assert begun.wait(30)
    waiting = store.put(shard(3), kv_buffer(shard(3), SIZE))
    closer = threading.Thread(target=store.close)
    closer.start()
    assert waiting.wait(30) is Outcome.CLOSED
    go_on.set()
    closer.join()
    assert running.outcome is Outcome.DONE
    assert put(store, shard(4)) is Outcome.CLOSED
    assert get(store, shard(1)) is Outcome.CLOSED
    store.drop(shard(1).key)
    open_store(tmp_path).close()  # the lock is free


def test_a_shard_of_another_length_under_the_same_key_takes_its_place(tmp_path: Path) -> None:
    """Shards became longer: the same last block now ends a shard that begins earlier."""
    store = open_store(tmp_path)
    long = shard(1, num_tokens=64)
    short = ShardMeta(long.key, bytes(32), 32, long.tokens[128:])
    assert put(store, short, 4096) is Outcome.DONE
    assert get(store, long, 8192) is Outcome.TOKENS
    assert store.contains(short.key)
    assert put(store, long, 8192) is Outcome.DONE
    assert store.span(long.key) == (0, 64)
    assert get(store, long, 8192) is Outcome.DONE
    assert store.stats().nbytes == 4096 + 8192
    store.check()
    store.close()


class Watching:
    """A policy that lets the first offered go and notes what it is told."""

    def __init__(self) -> None:
        self.uses: list[tuple[bytes, ServiceClass]] = []
        self.offered: dict[bytes, object] = {}
        self.times: list[int] = []

    def used(self, shard: object, service: ServiceClass, now_ns: int) -> None:
        self.uses.append((shard.key, service))  # type: ignore[attr-defined]
        self.times.append(now_ns)

    def offer(self, shard: object, now_ns: int) -> None:
        self.offered[shard.key] = shard  # type: ignore[attr-defined]

    def withdraw(self, shard: object) -> None:
        del self.offered[shard.key]  # type: ignore[attr-defined]

    def victim(self, now_ns: int) -> object:
        return next(iter(self.offered.values()), None)

    def left(self, shard: object, now_ns: int, *, evicted: bool) -> None:
        self.offered.pop(shard.key, None)  # type: ignore[attr-defined]


def test_any_policy_is_told_of_uses_and_classes(tmp_path: Path) -> None:
    policy = Watching()
    store = open_store(tmp_path, policy=policy)  # type: ignore[arg-type]
    root, leaf = shard(1), shard(2, shard(1))
    buffer = kv_buffer(root, SIZE)
    assert store.put(root, buffer, ServiceClass.P1).wait(30) is Outcome.DONE
    assert put(store, leaf) is Outcome.DONE
    assert store.get(root, buffer, ServiceClass.P0).wait(30) is Outcome.DONE
    assert policy.uses == [(root.key, ServiceClass.P1), (leaf.key, ServiceClass.P2), (root.key, ServiceClass.P0)]
    assert list(policy.offered) == [leaf.key]
    assert policy.times == sorted(policy.times)
    store.drop(leaf.key)
    assert list(policy.offered) == [root.key]
    store.close()
