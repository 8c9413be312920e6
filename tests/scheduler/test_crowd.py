"""Long prompts on rows are a crowd too: the pace must not depend on whether admission leaves anybody in the queue."""

from __future__ import annotations

from typing import Any

from firsttoken.core.request import EngineRequest, Request
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.kvcache import KVCache
from firsttoken.scheduler import Scheduler, SchedulerConfig
from firsttoken.scheduler.scheduler import CROWD_TOKENS
from firsttoken.simulate.run import KV_FORMAT

PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


class Asked:
    """A budget of 16 tokens that notes how many it was told to wait."""

    most = 16

    def __init__(self) -> None:
        self.waiting: list[int] = []

    def prefill_tokens(self, load: Any, waiting: int, gap_ms: float | None = None) -> int:
        self.waiting.append(waiting)
        return 16

    def limited(self, alone: int | None, mixed: int | None) -> Asked:
        return self


def waiting_told(*prompts: int, steps: int, clock: Any) -> list[int]:
    asked = Asked()
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_model_len=100_000), KVCache(KV_FORMAT, 10_000, model="m"), asked
    )
    for number, prompt in enumerate(prompts):
        scheduler.add(
            Request(EngineRequest(id=number, prompt=bytes(4 * prompt), params=PARAMS, seed=number, max_tokens=9))
        )
    for _ in range(steps):
        scheduler.plan()
    return asked.waiting


def test_what_running_prompts_still_want_waits_beside_decode_rows(clock: Any) -> None:
    # Both wait; the short one's token is under way when the long one starts; then the long one alone goes on.
    long = 5 * CROWD_TOKENS + 32
    assert waiting_told(16, long, steps=4, clock=clock) == [2, 1, 5, 4]
    assert waiting_told(16, long + 16, steps=4, clock=clock) == [2, 1, 5, 5]


def test_without_decode_rows_only_the_queue_counts(clock: Any) -> None:
    assert waiting_told(5 * CROWD_TOKENS, steps=3, clock=clock) == [1, 0, 0]


def test_short_prompts_on_rows_are_no_crowd(clock: Any) -> None:
    assert max(waiting_told(16, 200, 200, 200, steps=6, clock=clock)[2:]) <= 3
