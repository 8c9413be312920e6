"""Long random lives of all tiers at once, from fixed seeds: whatever happens when, no step reads foreign KV (`Device`
looks at every byte), each request gets the model's own tokens, and nothing is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import asdict

from firsttoken.core.clock import NS_PER_MS, clock_replaced
from firsttoken.core.retention import Retention
from tests.support.tiered import Clock, TieredWorld, running

FIRST = ("anyone", "compute", "copies")


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with clock_replaced(clock.read):
        yield clock


class Storm:
    def __init__(self, seed: int, folder: Path, clock: Clock) -> None:
        self.random = chance = Random(seed)
        self.clock = clock
        self.folder = folder
        self.options = {
            "blocks": chance.choice([10, 14, 24]),
            "host_blocks": chance.choice([6, 20, 60]),
            "slots": chance.randint(1, 4),
            "first": FIRST[seed % 3],
            "seed": seed,
            "policy": chance.choice(["lru", "default"]),
            "shard_tokens": chance.choice([4, 8, 16]),
            "submit_blocks": chance.randint(1, 4),
            "cost": lambda start, end: 0.1,
        }
        self.sessions = [[chance.randrange(3) for _ in range(chance.choice([4, 8, 13, 24]))] for _ in range(5)]
        self.totals: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.world = TieredWorld(folder, tick=clock.tick, **self.options)

    def run(self, actions: int) -> None:
        for _ in range(actions):
            self.act()
        self.end()

    def act(self) -> None:
        world, chance = self.world, self.random
        match chance.choices(
            ("add", "turn", "device", "files", "abort", "preempt", "wait", "damage", "drain", "restart", "crash"),
            (20, 50, 20, 20, 6, 4, 6, 2, 2, 0.7, 0.7),
        )[0]:
            case "add" if world.scheduler.num_waiting < 6:
                self.add()
            case "turn":
                world.turn(chance.randint(1, 3))
            case "device":
                world.machine_steps(chance.randint(1, 12))
            case "files":
                world.run_files(chance.randint(1, 3))
            case "abort" if world.requests:
                world.abort(chance.choice(list(world.requests)[-4:]))
            case "preempt" if running(world):
                world.scheduler.preempt(chance.choice(running(world)))
            case "wait":
                self.clock.now += chance.choice([1, 20, 300]) * NS_PER_MS
            case "damage":
                self.damage()
            case "drain":
                world.drain()
            case "restart":
                self.end()
                self.world = TieredWorld(self.folder, tick=self.clock.tick, **self.options)
            case "crash":
                self.count()
                world.crash()
                self.world = TieredWorld(self.folder, tick=self.clock.tick, **self.options)

    def add(self) -> None:
        """The next turn of a session, mostly; now and then somebody's who cannot wait, or who fails."""
        chance, most = self.random, 4 * self.options["blocks"]
        place = chance.randrange(len(self.sessions))
        prompt = self.sessions[place] + [chance.randrange(3) for _ in range(chance.randint(1, 6))]
        if len(prompt) > most - 10:
            prompt = prompt[: chance.randint(5, 12)]
        self.sessions[place] = prompt
        self.world.add(
            prompt,
            chance.randint(1, 8),
            fails=chance.random() < 0.03,
            service=chance.randrange(3),
            retention=chance.choice([None, None, Retention(chance.choice([1, 10**10]), None, chance.random() < 0.5)]),
            salt=chance.choice(["", "", "s"]),
            deadline_ns=self.clock.now + 20 * NS_PER_MS if chance.random() < 0.05 else 0,
        )

    def damage(self) -> None:
        files = sorted(self.folder.rglob("*.kv"))
        if not files:
            return
        path, other = self.random.choice(files), self.random.choice(files)
        try:
            data, others = bytearray(path.read_bytes()), other.read_bytes()
        except FileNotFoundError:  # a thread removes what was forgotten
            return
        if self.random.random() < 0.5 and data:
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        else:
            data = bytearray(others)[: self.random.choice([None, None, 100, -1, 0])]
        path.write_bytes(data)

    def end(self) -> None:
        self.world.drain()
        self.count()
        self.world.close()

    def count(self) -> None:
        self.totals.update(asdict(self.world.tiers.stats()))
        assert self.world.files is not None
        self.reads.update(self.world.files.store.stats().misses)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("begin", [0, 100, 200])
def test_storms_of_requests_faults_and_crashes_serve_nothing_foreign_and_lose_nothing(
    begin: int, tmp_path: Path, clock: Clock
) -> None:
    totals: Counter[str] = Counter()
    reads: Counter[str] = Counter()
    for seed in range(begin, begin + 12):
        storm = Storm(seed, tmp_path / str(seed), clock)
        storm.run(400)
        totals += storm.totals
        reads += storm.reads
    for count in ("host_tokens", "disk_tokens", "cancelled", "late", "failed_tokens", "host_evicted_blocks"):
        assert totals[count], f"{count}: what the storms were to try did not happen: {totals}"
    assert reads["corrupt"] + reads["cut"] + reads["tokens"] > 0, f"no damage was met: {reads}"
