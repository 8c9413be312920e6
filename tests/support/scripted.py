"""An executor without a model: it keeps rows as the real one does, and emits scripted tokens.

It checks every plan as it runs it: rows that work were started, positions follow one another, block tables are long
enough. Plans pass through their serialised form, as they would to another rank.
"""

from __future__ import annotations

import queue
import threading
import time
from array import array
from collections.abc import Callable
from concurrent.futures import Future

from firsttoken.core.clock import now_ns
from firsttoken.core.plan import PLAN_DECODER, PLAN_ENCODER, RowSample, StepPlan, StepResult

Script = Callable[[int, list[int]], int]  # (request id, known tokens) -> the next token


class ScriptedExecutor:
    lanes = ("main",)

    def __init__(self, script: Script, *, block_tokens: int = 16, step_s: float = 0.0) -> None:
        self._script = script
        self._block_tokens = block_tokens
        self.step_s = step_s
        self._rows: dict[int, dict] = {}
        self.plans: list[StepPlan] = []
        self.fail_at: int | None = None
        self.typical = True
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    unprepared = 0

    def idle(self) -> bool:
        return False

    def settle(self) -> None:
        pass

    def submit(self, plan: StepPlan, lane: str = "main") -> Future:
        future: Future = Future()
        self._queue.put((PLAN_DECODER.decode(PLAN_ENCODER.encode(plan)), future))
        return future

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(5)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            plan, future = item
            try:
                future.set_result(self._run(plan))
            except BaseException as error:
                future.set_exception(error)

    def _run(self, plan: StepPlan) -> StepResult:
        if self.fail_at is not None and len(self.plans) >= self.fail_at:
            raise RuntimeError("scripted failure")
        self.plans.append(plan)
        started_ns = now_ns()
        time.sleep(self.step_s)
        for slot in plan.retire:
            del self._rows[slot]
        for row in plan.starts:
            assert row.slot not in self._rows, f"slot {row.slot} started twice"
            self._rows[row.slot] = {
                "id": row.request_id,
                "tokens": list(array("I", row.tokens)),
                "blocks": list(row.blocks),
            }
        for added in plan.blocks:
            self._rows[added.slot]["blocks"] += added.blocks
        samples = []
        for work in plan.work:
            row = self._rows[work.slot]
            end = work.start + work.count
            assert end <= len(row["tokens"]), f"row {work.slot} computes {end} of {len(row['tokens'])} known tokens"
            assert len(row["blocks"]) * self._block_tokens >= end, "the block table is too short"
            if work.sample:
                assert end == len(row["tokens"]), "sampling before the end of the known tokens"
                token = self._script(row["id"], row["tokens"])
                row["tokens"].append(token)
                samples.append(RowSample(work.slot, token))
        return StepResult(plan.step_id, samples, started_ns=started_ns, ended_ns=now_ns(), typical=self.typical)
