"""A device with streams, simulated: real bytes, and at each moment one of those that may go next does.

``first`` says which: ``anyone`` is drawn, ``compute`` goes before copies, ``copies`` before compute; of copies, the
stream made last goes first. What is only right by luck is wrong under one of these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from firsttoken.kvcache.host_copy import copy_now


@dataclass
class Memory:
    """Blocks in a numpy array ``[num_blocks, stride]``; ``copy.BlockMemory``."""

    blocks: np.ndarray
    on_device: bool
    block_bytes: int = 0
    segment_blocks: int = 1 << 30

    def __post_init__(self) -> None:
        self.block_bytes = self.block_bytes or self.stride

    @property
    def address(self) -> int:
        return self.blocks.ctypes.data

    @property
    def num_blocks(self) -> int:
        return self.blocks.shape[0]

    @property
    def stride(self) -> int:
        return self.blocks.shape[1]


@dataclass
class MachineEvent:
    """``recorded`` and ``passed`` count its recordings; ``at`` is when it last passed."""

    machine: Machine
    recorded: int = 0
    passed: int = 0
    at: float = 0.0

    def query(self) -> bool:
        return self.passed == self.recorded

    def synchronize(self) -> None:
        while not self.query():
            assert self.machine.step(), "waits for what nobody will do"


@dataclass
class Operation:
    run: Callable[[], None]
    ready: Callable[[], bool] = lambda: True


@dataclass
class Queue:
    """One stream of the machine; `stream_copy.CopyStream`."""

    machine: Machine
    operations: deque[Operation] = field(default_factory=deque)
    clock: float = 0.0

    def wait_compute(self) -> None:
        event = MachineEvent(self.machine)
        self.machine.compute.record(event)
        self.wait_event(event)

    def wait_event(self, event: MachineEvent) -> None:
        recording = event.recorded  # a later recording is not waited for
        self.operations.append(
            Operation(
                lambda: setattr(self, "clock", max(self.clock, event.at)),
                lambda: event.passed >= recording,
            )
        )

    def copy(self, parts) -> None:
        self.machine.calls += 1
        for part in parts:
            self.operations.append(Operation(lambda part=part: self._copy(part)))

    def record(self, event: MachineEvent) -> None:
        event.recorded += 1
        recording = event.recorded

        def run() -> None:
            event.passed, event.at = recording, self.clock

        self.operations.append(Operation(run))

    def _copy(self, part) -> None:
        copy_now([part])
        self.clock += 1e-5 + part.nbytes / self.machine.bytes_per_s


class Machine:
    """`stream_copy.CopyDevice`. Nothing happens but in `step`, or when somebody waits."""

    def __init__(self, seed: int = 0, *, first: str = "anyone", bytes_per_s: float = 1e9) -> None:
        self.random = Random(seed)
        self.first = first
        self.bytes_per_s = bytes_per_s
        self.compute = Queue(self)
        self.queues: dict[str, Queue] = {}
        self.events = 0
        self.calls = 0

    def submit(self, work: Callable[[], None]) -> None:
        """Compute work."""
        self.compute.operations.append(Operation(work))

    def step(self) -> bool:
        """Do one operation; False when there is none that could be done."""
        ready = [q for q in (self.compute, *self.queues.values()) if q.operations and q.operations[0].ready()]
        if not ready:
            return False
        if self.first == "anyone":
            chosen = self.random.choice(ready)
        else:
            chosen = self.compute if self.first == "compute" and ready[0] is self.compute else ready[-1]
        chosen.operations.popleft().run()
        return True

    def finish(self) -> None:
        while self.step():
            pass
        assert not self.compute.operations
        assert not any(queue.operations for queue in self.queues.values()), "a stream waits for ever"

    def stream(self, direction: str) -> Queue:
        assert direction not in self.queues
        self.queues[direction] = Queue(self)
        return self.queues[direction]

    def event(self) -> MachineEvent:
        self.events += 1
        return MachineEvent(self)

    def seconds_between(self, begin: MachineEvent, end: MachineEvent) -> float:
        return end.at - begin.at

    def record_compute(self, event: MachineEvent) -> None:
        self.compute.record(event)

    def gate_compute(self, event: MachineEvent) -> None:
        self.compute.wait_event(event)

    def copy_now(self, parts) -> None:
        copy_now(parts)
