"""What tiers do in chosen moments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from firsttoken.core.clock import clock_replaced
from firsttoken.core.request import Status
from firsttoken.kvcache.tiers.cost import RestoreCost
from tests.support.tiered import Clock, TieredWorld


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with clock_replaced(clock.read):
        yield clock


A, B = [0] * 16 + [1], [1] * 16 + [2]
LONG, OTHER = [2] * 32 + [0], [3] * 32 + [0]


def world(folder: Path | None, clock: Clock, **options: Any) -> TieredWorld:
    return TieredWorld(folder, tick=clock.tick, **options)


def filled(folder: Path, clock: Clock, *prompts: list[int], **options: Any) -> TieredWorld:
    """A new world whose folder has the KV of these prompts."""
    first = world(folder, clock, **options)
    for prompt in prompts:
        first.add(prompt, 1)
        first.drain()
    first.close()
    return world(folder, clock, **options)


def push_out(w: TieredWorld) -> None:
    """Other prompts take all of the device."""
    for token in (5, 6, 7, 8):
        w.add([token] * (4 * w.kv.num_blocks - 8), 1)
        w.drain()


def test_what_the_device_evicts_comes_back_from_host_memory(clock: Clock) -> None:
    w = world(None, clock, host_blocks=64)
    w.add(A, 1)
    w.drain()
    push_out(w)
    again = w.add(A, 1)
    w.drain()
    assert (again.num_cached, again.num_cached_host, again.num_cached_disk) == (16, 16, 0)


def test_what_both_lost_comes_back_from_files(clock: Clock, tmp_path: Path) -> None:
    w = filled(tmp_path, clock, A)
    again = w.add(A, 1)
    w.drain()
    assert (again.num_cached, again.num_cached_host, again.num_cached_disk) == (16, 0, 16)


def test_two_restores_that_need_more_than_the_pool_end_one_after_the_other(clock: Clock, tmp_path: Path) -> None:
    w = filled(tmp_path, clock, LONG, OTHER, blocks=12, host_blocks=48)
    first, second = w.add(LONG, 3), w.add(OTHER, 3)
    w.turn()
    assert {first.status, second.status} == {Status.RUNNING, Status.WAITING}
    w.drain()
    assert [each.num_cached_disk for each in (first, second)] == [32, 32]


def test_no_room_for_a_prompts_files_when_it_comes_and_room_when_it_starts(clock: Clock, tmp_path: Path) -> None:
    w = filled(tmp_path, clock, LONG, OTHER, blocks=12, host_blocks=18)  # half of which files may pass through
    first, second = w.add(LONG, 3), w.add(OTHER, 3)
    w.drain()
    assert [each.num_cached_disk for each in (first, second)] == [32, 32]


@pytest.mark.parametrize("host_blocks", [1, 3])
def test_host_memory_smaller_than_a_prompt_is_of_little_use_and_does_no_harm(clock: Clock, host_blocks: int) -> None:
    w = world(None, clock, host_blocks=host_blocks)
    for _ in range(3):
        w.add(LONG, 2)
        w.drain()
        push_out(w)
    assert w.tiers.stats().full_shards > 0


def test_prompts_that_wait_for_the_same_files_read_them_once(clock: Clock, tmp_path: Path) -> None:
    w = filled(tmp_path, clock, LONG, blocks=24, host_blocks=24)  # of which 12 for files: not for both
    assert w.files is not None
    first, second = w.add(LONG, 3), w.add([*LONG[:32], 1, 2], 3)
    w.turn()
    assert w.tiers.stats().host_blocks == 8
    w.drain()
    assert [each.num_cached_disk for each in (first, second)] == [32, 32]
    assert w.files.stats().hits == 4, "as many as there are files"


def test_who_gives_up_does_not_take_the_others_files_away(clock: Clock, tmp_path: Path) -> None:
    w = filled(tmp_path, clock, LONG, blocks=24, host_blocks=24)
    assert w.files is not None
    first, second = w.add(LONG, 3), w.add(LONG, 3)
    w.turn()
    w.abort(first.request_id)
    w.run_files()
    w.abort(second.request_id)
    again = w.add(LONG, 3)
    w.turn()
    assert w.files.stats().hits == 4, "who comes while they are there, too"
    w.drain()
    assert again.num_cached_disk == 32
    assert w.tiers.stats().host_blocks == len(w.tiers.host.index), "and then they make room"


def test_an_abort_while_files_are_read_leaves_their_buffers_until_they_have_been(clock: Clock, tmp_path: Path) -> None:
    w = filled(tmp_path, clock, A)
    request = w.add(A, 3)
    w.turn()
    assert request.status is Status.RUNNING
    assert request.num_computed == 0
    w.abort(request.request_id)
    assert w.kv.stats().used == 0
    assert w.tiers.stats().host_blocks == 4, "the read goes on, and its buffers are still its own"
    w.run_files()
    w.tiers.advance()
    assert w.tiers.stats().host_blocks == 0
    w.drain()


def test_who_is_preempted_while_it_waits_for_kv_is_restored_later(clock: Clock, tmp_path: Path) -> None:
    w = filled(tmp_path, clock, A)
    request = w.add(A, 3)
    w.turn()
    w.scheduler.preempt(request.request_id)
    assert w.kv.stats().used == 0
    w.drain()
    assert request.finish_reason == "length"
    stats = w.tiers.stats()
    assert (stats.disk_tokens, stats.disk_restores, stats.disk_restore_s) == (16, 1, stats.restore_s)


def test_files_that_do_not_come_are_waited_for_once_and_others_are_not_asked(clock: Clock, tmp_path: Path) -> None:
    w = filled(tmp_path, clock, LONG, OTHER, blocks=24, host_blocks=48, cost=lambda start, end: 0.1)
    request = w.add(LONG, 3)
    w.turn()
    for _ in range(49):
        clock.tick()
        w.turn()
    assert request.num_computed == 0
    for _ in range(10):
        clock.tick()
        w.turn()
    assert request.num_computed > 0, "it waits for a disk that hangs"
    other = w.add(OTHER, 3)
    w.drain(files=False)
    assert (request.num_cached, other.num_cached) == (0, 0)
    assert w.tiers.stats().late == 1
    last = w.add([*OTHER, 1], 1)
    w.drain()
    assert last.num_cached > 0


def test_what_has_come_of_a_prompts_files_in_time_is_used(clock: Clock, tmp_path: Path) -> None:
    w = filled(tmp_path, clock, LONG, host_blocks=48, shard_tokens=8, cost=lambda start, end: 0.1)
    request = w.add(LONG, 3)
    w.turn()
    assert w.files is not None
    w.files.run(0)
    for _ in range(80):
        clock.tick()
        w.turn()
        w.machine_steps(5)
    w.drain()
    assert 0 < request.num_cached_disk < 32


def test_suspect_kv_is_forgotten_everywhere(clock: Clock, tmp_path: Path) -> None:
    """It failed on what others had computed before: nobody may fail on that again."""
    w = filled(tmp_path, clock, A, host_blocks=64)
    w.add(A, 1)
    w.drain()
    push_out(w)
    failing = w.add(A, 2, fails=True)
    w.drain()
    assert (failing.finish_reason, failing.num_cached) == ("error", 16)
    again = w.add(A, 1)
    w.drain()
    assert again.num_cached == 0
    w.close()
    w = world(tmp_path, clock, host_blocks=64)
    assert w.add(B, 1).num_cached == 0
    w.drain()


def test_blocks_that_are_being_copied_make_way_for_who_needs_them(clock: Clock) -> None:
    """All of the pool is lent to copies that do not end, and a prompt needs all of it."""
    w = world(None, clock, blocks=12, host_blocks=64, alone=40, first="compute", submit_blocks=16)
    w.add(LONG, 1)
    w.turn(depth=1)
    w.tiers.advance()
    assert not w.scheduler.num_running
    assert w.kv.stats().used == 8, "nothing is being copied"
    request = w.add(OTHER, 3)
    w.turn()
    assert request.status is Status.RUNNING
    w.drain()


def test_without_prefix_caching_nothing_is_kept_anywhere(clock: Clock, tmp_path: Path) -> None:
    w = world(tmp_path, clock, caching=False)
    for _ in range(2):
        w.add(A, 1)
        w.drain()
    assert (w.tiers.stats().spilled_blocks, w.tiers.stats().host_blocks) == (0, 0)


def test_restores_that_take_longer_than_thought_are_thought_to_take_longer_for_a_while() -> None:
    cost = RestoreCost(lambda start, end: 0.010)
    assert cost.is_worth(0.001, 0, 16)
    for _ in range(20):
        cost.took(0.001, 0.021)
    assert not cost.is_worth(0.001, 0, 16)
    declined = sum(not cost.is_worth(0.001, 0, 16) for _ in range(100))
    assert declined < 40, "never tried again"
