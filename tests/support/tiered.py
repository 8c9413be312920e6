"""An engine in miniature with all tiers: real scheduler, cache, host memory and files, on a simulated device.

The device's blocks are bytes that follow from their tokens and all before them, so foreign, stale or half-copied KV is
seen as soon as a step reads it. Steps and copies run when the machine says so (`copy_machine`), and reads and writes of
files when `Files` is told to: at any moment later, in any order.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from firsttoken.core.clock import NS_PER_MS
from firsttoken.core.identity import Identity
from firsttoken.core.kv_format import KVFormat
from firsttoken.core.plan import PLAN_DECODER, PLAN_ENCODER, RowSample, RowStart, StepPlan, StepResult
from firsttoken.core.request import EngineRequest, Request, Status
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.kvcache import KVCache
from firsttoken.kvcache.disk import DiskConfig, DiskHandle, DiskStore
from firsttoken.kvcache.eviction import make_policy
from firsttoken.kvcache.host import HostMemory, HostPool
from firsttoken.kvcache.stream_copy import StreamCopyEngine
from firsttoken.kvcache.tiers import Tiers
from firsttoken.scheduler import PlannedStep, Scheduler, SchedulerConfig, TokenCap
from tests.support.copy_machine import Machine, Memory

FORMAT = KVFormat(dtype="float32", layers=1, kv_heads=1, head_dim=8, block_tokens=4)
VOCABULARY = 4


def kv_value(before: int, token: int) -> int:
    """Stands for the KV of a token: depends on it and on all tokens before it."""
    return hash((before, token))


def first_value(salt: str) -> int:
    return len(salt)


def alone(prompt: list[int], salt: str, count: int) -> list[int]:
    """The tokens that the model chooses."""
    value = first_value(salt)
    for token in prompt:
        value = kv_value(value, token)
    chosen = []
    for _ in range(count):
        chosen.append(value % VOCABULARY)
        value = kv_value(value, chosen[-1])
    return chosen


class Clock:
    """Time that a world moves: a microsecond each time that it is read, a millisecond a tick. ``now`` is in ns."""

    def __init__(self) -> None:
        self.now = 10**12

    def read(self) -> int:
        self.now += 1000
        return self.now

    def tick(self) -> None:
        self.now += NS_PER_MS


class Files:
    """A `DiskStore` whose reads and writes begin when `run` is called, and are done when it returns."""

    def __init__(self, store: DiskStore) -> None:
        self.store = store
        self.jobs: list[tuple[DiskHandle, Callable[[], DiskHandle]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def put(self, *arguments: Any) -> DiskHandle:
        return self._later(lambda: self.store.put(*arguments))

    def get(self, *arguments: Any) -> DiskHandle:
        return self._later(lambda: self.store.get(*arguments))

    def _later(self, call: Callable[[], DiskHandle]) -> DiskHandle:
        handle = DiskHandle()
        self.jobs.append((handle, call))
        return handle

    def run(self, place: int = 0) -> None:
        handle, call = self.jobs.pop(place % len(self.jobs))
        outcome = call().wait(20)
        assert outcome is not None
        handle.resolve(outcome)

    def close(self) -> None:
        self.store.close()


class Device:
    """An executor on the machine: steps are done in its compute queue, which may be any time after `submit`."""

    def __init__(self, machine: Machine, blocks: int) -> None:
        self.machine = machine
        self.memory = Memory(np.full((blocks, FORMAT.bytes_per_block), 255, np.uint8), on_device=True)
        self.values = self.memory.blocks.view(np.int64).reshape(blocks, FORMAT.block_tokens, -1)
        self.rows: dict[int, tuple[RowStart, list[int], list[int]]] = {}
        self.salts: dict[int, str] = {}
        self.failing: set[int] = set()
        self.computed: dict[int, int] = {}

    def submit(self, plan: StepPlan) -> list[StepResult]:
        """The list gets the result once the step has run."""
        plan = PLAN_DECODER.decode(PLAN_ENCODER.encode(plan))
        results: list[StepResult] = []
        self.machine.submit(lambda: results.append(self._run(plan)))
        return results

    def _run(self, plan: StepPlan) -> StepResult:
        for slot in plan.retire:
            del self.rows[slot]
        for start in plan.starts:
            assert start.slot not in self.rows, f"slot {start.slot} is taken"
            self.rows[start.slot] = (start, list(array("I", start.tokens)), list(start.blocks))
        for more in plan.blocks:
            self.rows[more.slot][2].extend(more.blocks)
        samples, writes = [], []
        for work in plan.work:
            start, tokens, blocks = self.rows[work.slot]
            number, end = start.request_id, work.start + work.count
            assert len(set(blocks)) == len(blocks)
            assert work.sample == (end == len(tokens)), "a row samples exactly when it reaches the known end"
            value = first_value(self.salts[number])
            for position, token in enumerate(tokens[:end]):
                value = kv_value(value, token)
                block, place = blocks[position // 4], position % 4
                if position < work.start:
                    found = self.values[block, place]
                    assert (found == value).all(), f"request {number} reads foreign KV at position {position}"
                else:
                    writes.append((block, place, value))
            self.computed[number] = self.computed.get(number, 0) + work.count
            if work.sample:
                tokens.append(value % VOCABULARY)
                error = "non-finite logits" if number in self.failing else None
                samples.append(RowSample(work.slot, value % VOCABULARY, error=error))
        for block, place, value in writes:
            self.values[block, place] = value
        return StepResult(plan.step_id, samples)


class TieredWorld:
    """``host_blocks`` of host memory, and files in ``folder`` (None for none). ``cost`` is the recomputing's; ``tick``
    lets some time pass."""

    def __init__(
        self,
        folder: Path | None,
        *,
        blocks: int = 12,
        host_blocks: int = 24,
        slots: int = 3,
        alone: int = 12,
        mixed: int = 6,
        seed: int = 0,
        first: str = "anyone",
        policy: str = "lru",
        shard_tokens: int = 8,
        submit_blocks: int = 2,
        caching: bool = True,
        model: str = "m",
        cost: Callable[[int, int], float] = lambda start, end: 1e9,
        cap_bytes: int = 1 << 30,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.random = Random(seed)
        self.tick = tick
        self.machine = Machine(seed, first=first)
        self.device = Device(self.machine, blocks)
        memory = HostMemory(host_blocks, FORMAT.bytes_per_block)
        memory.open()
        copies = StreamCopyEngine(
            {"device": self.device.memory, "host": memory},
            self.machine,
            max_submit_bytes=submit_blocks * FORMAT.bytes_per_block,
        )
        self.kv = KVCache(
            FORMAT,
            blocks,
            model=model,
            prefix_caching=caching,
            policy=make_policy(policy),
            shard_tokens=lambda request: shard_tokens,
        )
        self.files = None
        if folder is not None:
            config = DiskConfig(folder=folder, cap_bytes=cap_bytes, margin_bytes=0, sync=False, threads=2)
            store = DiskStore(config, Identity(model=model, kv_format=FORMAT.key))
            assert store.scanned(20)
            self.files = Files(store)
        self.tiers = Tiers(
            HostPool(memory),
            copies,
            cost,
            block_tokens=FORMAT.block_tokens,
            policy=make_policy(policy),
            disk=self.files,  # type: ignore[arg-type]
        )
        self.kv.attach(self.tiers)
        config = SchedulerConfig(max_num_seqs=slots, max_model_len=4 * blocks)
        self.scheduler = Scheduler(config, self.kv, TokenCap(alone, mixed))
        self.flying: deque[tuple[PlannedStep, list[StepResult]]] = deque()
        self.requests: dict[int, Request] = {}
        self.ended: set[int] = set()

    def add(self, prompt: list[int], max_tokens: int = 3, *, fails: bool = False, **fields: Any) -> Request:
        number = len(self.requests) + 1
        wire = EngineRequest(
            id=number,
            prompt=array("I", prompt).tobytes(),
            params=SamplingParams(max_tokens=max_tokens, temperature=0),
            seed=0,
            max_tokens=max_tokens,
            **fields,
        )
        request = Request(wire)
        self.device.salts[number] = request.salt
        if fails:
            self.device.failing.add(number)
        self.scheduler.add(request)
        self.requests[number] = request
        return request

    # ------------------------------------------------------------------ what happens

    def turn(self, depth: int = 2) -> None:
        """As the loop's: take in copies, plan, launch; harvest when as many as ``depth`` are in flight, or none could
        be planned."""
        if self.tiers.busy:
            self.tiers.advance()
        planned = self.scheduler.plan()
        self.ended.update(request.request_id for request in self.scheduler.expired())
        if planned is not None:
            self.flying.append((planned, self.device.submit(planned.plan)))
        self.check()
        while self.flying and (planned is None or len(self.flying) >= depth):
            self.harvest()

    def harvest(self) -> None:
        planned, results = self.flying.popleft()
        while not results:
            assert self.machine.step(), "a step that never ends"
        for update in self.scheduler.complete(planned, results[0]):
            if update.finished:
                self.ended.add(update.request.request_id)
        self.check()

    def abort(self, number: int) -> None:
        if self.scheduler.abort(number) is not None:
            self.ended.add(number)
        self.check()

    def machine_steps(self, count: int) -> None:
        for _ in range(count):
            self.machine.step()

    def run_files(self, most: int | None = None) -> None:
        while self.files is not None and self.files.jobs and most != 0:
            self.files.run(self.random.randrange(len(self.files.jobs)))
            most = None if most is None else most - 1

    def drain(self, *, files: bool = True) -> None:
        """Until all requests have ended and nothing is under way, each looked at."""
        for _ in range(2000):
            if not (self.scheduler.num_running or self.scheduler.num_waiting or self.flying):
                break
            self.tick()  # or those whose place was taken would never come back
            self.turn(depth=1)
            self.machine_steps(3)
            if files:
                self.run_files(1)
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0, "requests never ended"
        for _ in range(2000):
            if not self.tiers.busy:
                break
            self.tiers.advance()
            self.machine.step()
            self.run_files(1)
            self.check()
        self.settled()
        for number in self.requests:
            self.check_output(number)

    def crash(self) -> None:
        """The process has ended at some moment: what was under way never happens."""
        if self.files is not None:
            self.files.jobs.clear()
            self.files.close()

    def close(self) -> None:
        self.tiers.close()

    # ------------------------------------------------------------------ what must hold

    def check(self) -> None:
        self.kv.check()
        self.tiers.check()

    def settled(self) -> None:
        """Nobody holds anything any more, anywhere."""
        assert not self.tiers.busy, "copies, reads or writes that never end"
        self.kv.check_unused()
        assert self.kv.stats().used == 0, "device blocks that nobody gives back"
        host = self.tiers.host
        assert all(not shard.holders for shard in host.index.shards()), "host shards that stay leased"
        assert len(host.index) == self.tiers.stats().host_blocks, "host blocks are lost"
        assert self.ended == self.requests.keys()
        assert self.scheduler.plan() is None, "a step although all have ended"
        assert not self.scheduler.wake_ns, "somebody waits for KV although all have ended"

    def check_output(self, number: int) -> None:
        """Its tokens are those of the model alone, and its tokens were found or computed."""
        request = self.requests[number]
        prompt = list(request.tokens[: request.num_prompt])
        output = list(request.tokens[request.num_prompt :])
        assert output == alone(prompt, request.salt, request.max_tokens)[: len(output)]
        assert 0 <= request.num_cached_host + request.num_cached_disk <= request.num_cached < request.num_prompt
        if request.finish_reason == "length":
            assert len(output) == request.max_tokens
            if not request.preemptions:
                computed = self.device.computed[number]
                # A row that is planned ahead of its last token computes that too.
                assert computed - (request.num_prompt - request.num_cached + len(output) - 1) in (0, 1)


def running(world: TieredWorld) -> list[int]:
    return [number for number, request in world.requests.items() if request.status is Status.RUNNING]
