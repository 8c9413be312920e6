"""Any sequence of requests, aborts, preemptions, copies, reads, writes, damage and crashes, on all tiers: no step reads
KV of other tokens, every block is accounted for after each, and every request gets the model's own tokens."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from msgspec.structs import asdict

from firsttoken.core.clock import NS_PER_MS, clock_replaced
from firsttoken.core.retention import Retention
from tests.support.tiered import Clock, TieredWorld, running

# Few different blocks, so that prefixes meet; long enough for several shards.
PROMPTS = st.builds(
    lambda blocks, end: [token for block in blocks for token in block] + end,
    st.lists(st.sampled_from([(0, 0, 0, 0), (0, 0, 0, 0), (1, 1, 0, 1)]), min_size=1, max_size=6),
    st.lists(st.integers(0, 1), min_size=1, max_size=5),
)


def machine_of(clock: Clock, totals: Counter[str]) -> type[RuleBasedStateMachine]:
    class TierMachine(RuleBasedStateMachine):
        @initialize(
            blocks=st.integers(9, 20),
            host_blocks=st.sampled_from([3, 8, 16, 40]),
            slots=st.integers(1, 4),
            first=st.sampled_from(["anyone", "compute", "copies"]),
            seed=st.integers(0, 1000),
            policy=st.sampled_from(["lru", "default"]),
            shard_tokens=st.sampled_from([4, 8, 16]),
            submit_blocks=st.integers(1, 4),
            disk=st.sampled_from([True, True, False]),
            cost=st.sampled_from(["always", "always", "by length"]),
        )
        def start(self, disk: bool, cost: str, **options: Any) -> None:
            self.folder = Path(tempfile.mkdtemp(prefix="kv-tiers-")) if disk else None
            if cost == "by length":
                options["cost"] = lambda start, end: 1e9 if (end - start) % 8 == 0 else 0.0
            self.options = options
            self.world = TieredWorld(self.folder, tick=clock.tick, **options)

        @rule(
            prompt=PROMPTS,
            max_tokens=st.integers(1, 8),
            service=st.integers(0, 2),
            salt=st.sampled_from(["", "", "s"]),
            time_left=st.sampled_from([None] * 7 + [5]),
            fails=st.sampled_from([False] * 9 + [True]),
            retention=st.none() | st.builds(Retention, st.sampled_from([1, 10**10]), st.none(), st.booleans()),
        )
        def add(self, prompt: list[int], max_tokens: int, time_left: int | None, **fields: Any) -> None:
            deadline = 0 if time_left is None else clock.now + time_left * NS_PER_MS
            if -(-(len(prompt) + max_tokens) // 4) <= self.options["blocks"]:
                self.world.add(prompt, max_tokens, deadline_ns=deadline, **fields)

        @rule(depth=st.integers(1, 3))
        def turn(self, depth: int) -> None:
            self.world.turn(depth)

        @rule(count=st.integers(1, 12))
        def device(self, count: int) -> None:
            self.world.machine_steps(count)

        @precondition(lambda self: self.world.files and self.world.files.jobs)
        @rule(place=st.integers(0, 9), tell=st.booleans())
        def disk(self, place: int, tell: bool) -> None:
            self.world.files.run(place)
            if tell and self.world.tiers.busy:
                self.world.tiers.advance()
                self.world.check()

        @rule(ms=st.sampled_from([1, 10, 200]))
        def wait(self, ms: int) -> None:
            clock.now += ms * NS_PER_MS

        @precondition(lambda self: self.world.requests)
        @rule(data=st.data())
        def abort(self, data: st.DataObject) -> None:
            self.world.abort(data.draw(st.sampled_from(sorted(self.world.requests))))

        @precondition(lambda self: running(self.world))
        @rule(data=st.data())
        def preempt(self, data: st.DataObject) -> None:
            self.world.scheduler.preempt(data.draw(st.sampled_from(running(self.world))))
            self.world.check()

        @rule()
        def reclaim(self) -> None:
            self.world.kv.reclaim()
            self.world.check()

        @precondition(lambda self: self.folder is not None)
        @rule(
            number=st.integers(0, 50), how=st.sampled_from(["flip", "cut", "grow", "remove", "swap"]), at=st.integers(0)
        )
        def damage(self, number: int, how: str, at: int) -> None:
            assert self.folder is not None
            files = sorted(self.folder.rglob("*.kv"))
            if files:
                damage(files, number % len(files), how, at)

        @precondition(lambda self: self.folder is not None)
        @rule(orderly=st.booleans())
        def restart(self, orderly: bool) -> None:
            if orderly:
                self.end()
            else:
                self.world.crash()
            self.world = TieredWorld(self.folder, tick=clock.tick, **self.options)

        def end(self) -> None:
            self.world.drain()
            totals.update(asdict(self.world.tiers.stats()))
            self.world.close()

        def teardown(self) -> None:
            if hasattr(self, "world"):
                self.end()
                if self.folder is not None:
                    shutil.rmtree(self.folder)

    return TierMachine


def damage(files: list[Path], number: int, how: str, at: int) -> None:
    path = files[number]
    data = bytearray(path.read_bytes())
    if not data:
        return
    match how:
        case "flip":
            data[at % len(data)] ^= 1 << at % 8
        case "cut":
            del data[at % len(data) :]
        case "grow":
            data += b"x"
        case "remove":
            path.unlink()
            return
        case "swap":
            data = bytearray(files[number - 1].read_bytes())
    path.write_bytes(data)


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with clock_replaced(clock.read):
        yield clock


def test_a_request_alone_makes_room_of_what_it_holds_twice(clock: Clock) -> None:
    """It was preempted by one that computed the same tokens as it will: its block and the other's are both held, and
    the pool has as many as it needs."""
    machine = machine_of(clock, Counter())()
    machine.start(
        blocks=9,
        host_blocks=8,
        slots=1,
        first="anyone",
        seed=0,
        policy="lru",
        shard_tokens=4,
        submit_blocks=1,
        disk=True,
        cost="always",
    )
    machine.device(count=1)
    rest = {"fails": False, "retention": None, "salt": "", "time_left": None}
    machine.add(max_tokens=8, prompt=[0] * 24 + [1, 0], service=1, **rest)
    machine.add(max_tokens=4, prompt=[0] * 24 + [1], service=0, **rest)
    machine.teardown()  # answers both


@pytest.mark.timeout(200)
def test_any_sequence_serves_no_kv_but_its_own_and_loses_no_block(clock: Clock) -> None:
    totals: Counter[str] = Counter()
    run_state_machine_as_test(
        machine_of(clock, totals),
        settings=settings(
            max_examples=50, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    assert totals["spilled_blocks"], "nothing has reached a tier"
