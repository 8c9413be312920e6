"""What the accounts of requests cost: us to make and keep a record and bytes of one, us to make the account itself, and
us that a plan takes to say what the waiting requests wait for; the least of several rounds, since others' work on the
machine only adds. ``python -m benchmarks.account_cost``"""

from __future__ import annotations

import gc
import json
import time
import timeit
import tracemalloc
from collections.abc import Callable

from firsttoken.core.clock import now_ns
from firsttoken.core.timeline import Mark, Timeline
from firsttoken.core.waits import Wait
from firsttoken.frontend.gaps import AccountMaker
from firsttoken.frontend.times import RequestTimes
from firsttoken.observability.recent import EndedRequest, RecentRequests
from firsttoken.scheduler.waits import Waits
from firsttoken.transport.messages import RequestDelta, Spent

REQUESTS = 100
ROUNDS = 20


def times_of(tokens: int) -> RequestTimes:
    """An answer of so many tokens, as it stands when its last byte is written."""
    began = now_ns()
    times = RequestTimes(Timeline([(mark, began + mark * 1000) for mark in range(1, 5)]))
    stamps = [(int(mark), began + mark * 1000) for mark in (Mark.ARRIVED, Mark.SCHEDULED, Mark.FIRST_TOKEN)]
    spent = Spent([0] * len(Wait), 1, tokens - 1)
    times.note_at_once(RequestDelta(1, [1], stamps=list(stamps), spent=spent), began + 10_000)
    for number in range(tokens - 2):
        times.note_at_once(RequestDelta(1, [1]), began + 20_000 + number * 1000)
    end = now_ns()
    stamps.append((int(Mark.FINISHED), end))
    times.note_at_once(RequestDelta(1, [1], finish_reason="stop", stamps=stamps, spent=spent), end)
    times.finish(end)
    times.timeline.stamp(Mark.WRITTEN)
    return times


def record_of(times: RequestTimes, number: int) -> EndedRequest:
    stamps = times.timeline.stamps()
    return EndedRequest(
        id=f"req-{number:024x}",
        response_id=f"cmpl-{number:024x}",
        engine_ids=(number,),
        route="/v1/completions",
        model="m",
        outcome="finished",
        received_ns=stamps[0][1],
        received_unix_ns=time.time_ns(),
        ended_ns=stamps[-1][1],
        make_account=AccountMaker(times, None, (number,), ""),
        timeline=tuple(stamps),
        token_times=times.token_times,
    )


def timed_us(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) / REQUESTS * 1e6


def one_round(tokens: int) -> tuple[float, float]:
    """us of keeping a request, and of making its account."""
    made = [times_of(tokens) for _ in range(REQUESTS)]
    recent = RecentRequests()

    def keep() -> None:
        for number, times in enumerate(made):
            recent.add(record_of(times, number))

    kept = timed_us(keep)
    return kept, timed_us(lambda: [one.account for one in recent.latest(REQUESTS)])


def measure(tokens: int) -> dict[str, float]:
    rounds = [one_round(tokens) for _ in range(ROUNDS)]
    gc.collect()
    tracemalloc.start()
    kept = RecentRequests()
    for number in range(REQUESTS):
        kept.add(record_of(times_of(tokens), number))
    gc.collect()
    size = tracemalloc.get_traced_memory()[0] / REQUESTS
    tracemalloc.stop()
    return {"keep_us": min(kept for kept, _ in rounds), "account_us": min(made for _, made in rounds), "bytes": size}


def plan_us() -> float:
    waits = Waits()
    lacks = [None, None, Wait.SLOT]

    def plan() -> None:
        waits.plan(5)
        waits.explain(lacks, Wait.ORDER)

    return min(timeit.repeat(plan, number=1000, repeat=50)) / 1000 * 1e6


if __name__ == "__main__":
    print(json.dumps({"plan_us": plan_us(), **{str(tokens): measure(tokens) for tokens in (16, 128, 1024)}}, indent=1))
