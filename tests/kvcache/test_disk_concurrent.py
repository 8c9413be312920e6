"""Many puts, gets and drops at once against a dictionary, and the policy's own order."""

from __future__ import annotations

import random
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.disk import DiskHandle, DiskStore, Outcome, ShardMeta, aligned_buffer
from firsttoken.kvcache.disk.index import DiskIndex
from firsttoken.kvcache.eviction import Shard, make_policy
from tests.support.disk_shards import MIB, kv_buffer, kv_bytes, open_store, shard

SIZE = 50_000
FILE = 4096 + SIZE
CHAIN = [shard(0)]
for _number in range(1, 30):
    # Several chains that fork.
    CHAIN.append(shard(_number, CHAIN[_number // 2] if _number % 5 else None))
PAYLOADS = [kv_buffer(meta, SIZE) for meta in CHAIN]
NUMBERS = st.integers(0, len(CHAIN) - 1)


class StoreMachine(RuleBasedStateMachine):
    """One caller; what is under way may or may not be there, all else is exactly as in ``there``."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.there: set[int] = set()
        self.writes: dict[int, DiskHandle] = {}
        self.reads: list[tuple[int, memoryview, DiskHandle]] = []
        self.store: DiskStore = self.open()

    def open(self) -> DiskStore:
        return open_store(Path(self.folder.name), cap_bytes=40 * FILE, threads=3, sync=False)

    @rule(number=NUMBERS)
    def put(self, number: int) -> None:
        self.writes[number] = self.store.put(CHAIN[number], PAYLOADS[number])

    @rule(number=NUMBERS)
    def get(self, number: int) -> None:
        into = aligned_buffer(SIZE)
        self.reads.append((number, into, self.store.get(CHAIN[number], into)))

    @rule(number=NUMBERS)
    def drop(self, number: int) -> None:
        self.settle_reads()
        self.store.drop(CHAIN[number].key)
        handle = self.writes.pop(number, None)
        assert handle is None or handle.wait(30) in (Outcome.DONE, Outcome.DROPPED)
        self.there.discard(number)
        assert not self.store.contains(CHAIN[number].key)

    @precondition(lambda self: self.writes or self.reads)
    @rule()
    def settle(self) -> None:
        self.settle_reads()
        for number, handle in self.writes.items():
            assert handle.wait(30) is Outcome.DONE
            self.there.add(number)
        self.writes.clear()

    @rule()
    def restart(self) -> None:
        self.settle()
        self.store.close()
        self.store = self.open()

    def settle_reads(self) -> None:
        for number, into, handle in self.reads:
            outcome = handle.wait(30)
            if outcome is Outcome.DONE:
                assert into == PAYLOADS[number], "the KV of something else"
            else:
                assert outcome is Outcome.ABSENT
                assert number not in self.there
        self.reads.clear()

    @invariant()
    def is_as_in_the_model(self) -> None:
        self.store.check()
        for number, meta in enumerate(CHAIN):
            if number not in self.writes:
                assert self.store.contains(meta.key) == (number in self.there)

    def teardown(self) -> None:
        self.settle()
        self.store.close()
        self.folder.cleanup()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_many_callers_at_once_under_a_cap(tmp_path: Path) -> None:
    """Four threads put, get and drop at random where only a third fits: no hit is wrong, and the books balance."""
    store = open_store(tmp_path, cap_bytes=max(MIB, 10 * FILE), threads=4, sync=False, max_writes=8, max_reads=8)
    wrong: list[str] = []
    hits = [0] * 4

    def call(seed: int) -> None:
        rng = random.Random(seed)
        into = aligned_buffer(SIZE)
        for _ in range(400):
            number = rng.randrange(len(CHAIN))
            meta = CHAIN[number]
            action = rng.random()
            if action < 0.45:
                outcome = store.put(meta, PAYLOADS[number], ServiceClass(rng.randrange(3))).wait(30)
                expected = {Outcome.DONE, Outcome.QUEUE_FULL, Outcome.DROPPED, Outcome.NO_SPACE}
            elif action < 0.95:
                outcome = store.get(meta, into).wait(30)
                expected = {Outcome.DONE, Outcome.ABSENT, Outcome.QUEUE_FULL}
                hits[seed] += outcome is Outcome.DONE
                if outcome is Outcome.DONE and into != PAYLOADS[number]:
                    wrong.append(f"shard {number}")
            else:
                store.drop(meta.key)
                continue
            if outcome not in expected:
                wrong.append(f"{outcome} of shard {number}")

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert min(hits) > 0
    store.check()
    stats = store.stats()
    store.close()
    files = list((tmp_path / "firsttoken-kv").glob("*.kv"))
    assert sum(path.stat().st_size for path in files) == stats.nbytes <= stats.cap_bytes
    assert {path.stem for path in files} == {meta.key.hex() for meta in CHAIN if store.contains(meta.key)}
    assert stats.errors == {}
    assert set(stats.misses) <= {"absent", "queue_full"}


# ------------------------------------------------- index and policy


@given(st.lists(st.tuples(st.sampled_from(["add", "use", "hold", "release", "remove", "evict", "stranger"]), NUMBERS)))
def test_index_offers_what_may_go_and_evicts_the_oldest(steps: list[tuple[str, int]]) -> None:
    index = DiskIndex(make_policy("lru"))
    used: dict[bytes, int] = {}
    strangers: list[bytes] = []
    for now, (action, number) in enumerate(steps, 1):
        meta: ShardMeta = CHAIN[number]
        stored = index.get(meta.key)
        if action == "add":
            index.add(Shard(meta.key, meta.start, 32, FILE), meta.parent, ServiceClass.P2, now)
            used[meta.key] = now
            if meta.key in strangers:
                strangers.remove(meta.key)
        elif action == "use" and stored:
            index.use(stored, ServiceClass.P0, now)
            used[meta.key] = now
        elif action == "hold" and stored:
            index.hold(stored, now)
        elif action == "release" and stored and stored.holds:
            index.release(stored, now)
        elif action == "remove":
            index.remove(meta.key, now)
            used.pop(meta.key, None)
            if meta.key in strangers:
                strangers.remove(meta.key)
        elif action == "stranger" and not stored:
            index.add_stranger(meta.key, 7)
            if meta.key not in strangers:
                strangers.append(meta.key)
        elif action == "evict":
            free = [
                key
                for key in used
                if not held(index, key) and not any(m.parent == key and m.key in used for m in CHAIN)
            ]
            expected = strangers[0] if strangers else min(free, key=used.__getitem__, default=None)
            victim = index.evict(now)
            assert (victim[0] if victim else None) == expected
            if expected in strangers:
                strangers.remove(expected)
            elif expected is not None:
                del used[expected]
        index.check()
        assert index.nbytes == FILE * len(used) + 7 * len(strangers)


def held(index: DiskIndex, key: bytes) -> int:
    stored = index.get(key)
    assert stored is not None
    return stored.holds


@pytest.mark.parametrize("files", [2000])
def test_an_old_folder_is_known_soon(tmp_path: Path, files: int) -> None:
    """The rate that docs/kvcache-disk.md tells, with room for a slow machine: 2,000 files within 2 s."""
    store = open_store(tmp_path, sync=False, threads=2, max_writes=files)
    metas = [shard(number, num_tokens=16) for number in range(files)]
    handles = [store.put(meta, kv_bytes(meta, 1)) for meta in metas]
    assert all(handle.wait(60) is Outcome.DONE for handle in handles)
    store.close()
    store = open_store(tmp_path)
    stats = store.stats()
    assert stats.files == files
    assert stats.scan_s is not None
    assert stats.scan_s < 2.0
    store.close()
