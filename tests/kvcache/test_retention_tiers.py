"""Kept means kept in some tier: what the device has no room for, or has to let go, the tiers below it keep instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from firsttoken.core.clock import NS_PER_S, clock_replaced
from firsttoken.core.request import Request
from firsttoken.core.retention import NotKept, Retention
from firsttoken.kvcache.disk.kept import KeptFiles
from tests.support.kv import FORMAT
from tests.support.tiered import Clock, TieredWorld

TTL = 100 * NS_PER_S
LONG = Retention(TTL)
MINE, YOURS = [0] * 16 + [1], [1] * 16 + [2]  # of 4 blocks that are cached, and one


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with clock_replaced(clock.read):
        yield clock


def world(clock: Clock, folder: Path | None = None, **options: Any) -> TieredWorld:
    return TieredWorld(folder, tick=clock.tick, **options)


def through(w: TieredWorld, prompt: list[int], wish: Retention | None = None, tokens: int = 1) -> Request:
    request = w.add(prompt, tokens, retention=wish)
    w.drain()
    return request


def flood(w: TieredWorld, rounds: int = 6, blocks: int = 10) -> None:
    """Others take all of the device, and of host memory."""
    for number in range(rounds):
        through(w, [100 + number + len(w.requests)] * (4 * blocks))


def found(w: TieredWorld, prompt: list[int]) -> tuple[int, int, int]:
    again = through(w, prompt)
    return (
        again.num_cached - again.num_cached_host - again.num_cached_disk,
        again.num_cached_host,
        again.num_cached_disk,
    )


def test_what_the_device_has_no_room_to_keep_host_memory_keeps(clock: Clock) -> None:
    w = world(clock, blocks=12, host_blocks=24)  # of which 3 and 6 may be kept
    plain, mine = through(w, YOURS), through(w, MINE, LONG)
    assert (plain.kept, mine.kept, mine.kept_reason) == (None, True, None)
    assert (w.kv.stats().kept, w.tiers.stats().host_kept_blocks) == (0, 4)
    flood(w)
    assert found(w, YOURS) == (0, 0, 0)
    flood(w)
    assert found(w, MINE) == (0, 16, 0)
    w.close()


def test_its_time_is_over_there_too_and_begins_anew_with_each_use(clock: Clock) -> None:
    w = world(clock, blocks=12, host_blocks=24)
    assert through(w, MINE, LONG).kept
    for _ in range(3):
        clock.now += TTL * 6 // 10
        flood(w)
        assert found(w, MINE) == (0, 16, 0), "it was used since"
    clock.now += TTL + NS_PER_S
    flood(w)
    assert found(w, MINE) == (0, 0, 0)
    assert w.kv.evictions().kept == w.tiers.stats().lost_kept_shards == 0
    w.close()


def test_no_quota_that_has_room_is_told(clock: Clock) -> None:
    w = world(clock, blocks=12, host_blocks=16)  # 3 and 4
    assert through(w, MINE, LONG).kept
    yours = through(w, YOURS, LONG)
    assert (yours.kept, yours.kept_reason) == (False, NotKept.ALL_QUOTAS)
    assert through(w, MINE, LONG).kept, "it takes no more room"
    w.close()


def test_what_the_device_keeps_and_has_to_let_go_host_memory_keeps(clock: Clock) -> None:
    w = world(clock, blocks=16, host_blocks=24)
    assert through(w, MINE, LONG).kept
    assert (w.kv.stats().kept, w.tiers.stats().host_kept_blocks) == (4, 0)
    # One request alone needs more than the rest of the device.
    through(w, [7] * 60)
    assert (w.kv.stats().kept, w.tiers.stats().host_kept_blocks) == (0, 4)
    flood(w, blocks=14)
    assert found(w, MINE) == (0, 16, 0)
    assert w.kv.evictions().kept == w.tiers.stats().lost_kept_shards == 0
    w.close()


def test_what_no_memory_keeps_files_keep(clock: Clock, tmp_path: Path) -> None:
    files = 8 * (FORMAT.bytes_per_block * 2 + 4096 + 4096)
    w = world(clock, tmp_path, blocks=12, host_blocks=12, cap_bytes=max(1 << 20, 4 * files))
    assert through(w, MINE, LONG).kept, "the quotas of the device and of host memory have no room for 4 blocks"
    assert (w.kv.stats().kept, w.tiers.stats().host_kept_blocks) == (0, 2), "host memory has for one of two shards"
    assert w.tiers.disk is not None
    assert w.tiers.disk.stats().kept_bytes > 0
    plain = through(w, YOURS)
    for _ in range(20):
        flood(w, 8)
    assert w.tiers.disk.stats().evicted > 0
    assert found(w, MINE) == (0, 0, 16)
    assert found(w, list(plain.tokens[:17])) == (0, 0, 0)
    w.close()


def test_what_host_memory_kept_and_has_to_let_go_files_keep(clock: Clock, tmp_path: Path) -> None:
    w = world(clock, tmp_path, blocks=16, host_blocks=16)
    assert through(w, MINE, LONG).kept
    through(w, [7] * 60)  # all of the device, and of host memory but for one block
    assert w.kv.stats().kept == 0
    flood(w, blocks=15)
    assert w.tiers.disk is not None
    kept = w.tiers.stats().host_kept_blocks * FORMAT.bytes_per_block + w.tiers.disk.stats().kept_bytes
    assert kept > 0
    assert sum(found(w, MINE)) == 16
    assert w.kv.evictions().kept == w.tiers.stats().lost_kept_shards == 0
    w.close()


def test_a_conversation_that_goes_on_is_kept_below_no_more(clock: Clock) -> None:
    w = world(clock, blocks=12, host_blocks=32)
    asked = through(w, MINE, Retention(TTL, None, True), tokens=8)
    assert (asked.kept, w.tiers.stats().host_kept_blocks) == (True, 6)
    through(w, MINE)
    assert w.tiers.stats().host_kept_blocks == 6, "the same prompt does not go on"
    through(w, [*asked.tokens, 3, 3, 3])
    assert w.tiers.stats().host_kept_blocks == 0
    w.close()


def test_a_wish_is_kept_where_others_go_on_behind_it(clock: Clock) -> None:
    """The shards of the wish are nobody's last ones: they are told of by nobody's leaving."""
    w = world(clock, blocks=12, host_blocks=24)
    through(w, [*MINE[:16], *[3] * 9])
    assert through(w, MINE, LONG).kept
    assert w.tiers.stats().host_kept_blocks == 4
    w.close()


def test_suspect_kv_is_kept_nowhere(clock: Clock, tmp_path: Path) -> None:
    w = world(clock, tmp_path, blocks=12, host_blocks=24)
    assert through(w, MINE, LONG).kept
    w.add(MINE, 1, fails=True)
    w.drain()
    assert (w.kv.stats().kept, w.tiers.stats().host_kept_blocks) == (0, 0)
    w.close()


def test_room_for_kept_files_is_counted_and_comes_free() -> None:
    kept = KeptFiles(100)
    assert kept.keep(b"a", 60, 10, 5, 0)
    assert not kept.keep(b"b", 60, 10, 5, 0)
    assert kept.keep(b"a", 60, 20, 5, 0), "it takes no more room"
    assert kept.used(b"a", 17) == 22
    assert kept.used(b"b", 17) == 0
    assert not kept.room(60, 21)
    assert kept.keep(b"b", 60, 40, 5, 22), "the first one's time is over"
    kept.left(b"b")
    assert (kept.nbytes, kept.until(b"b")) == (0, 0)
    for at in range(1000):
        assert kept.keep(b"c", 1, 10**9 + at, 5, 22)
    assert len(kept._ends) < 100
