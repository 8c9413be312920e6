"""Virtual minutes through the real scheduler, cache and admission: nothing leaks, and what would leak is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.soak import Look, check, grown, held, repeated, soak, synthetic

from firsttoken.core.clock import NS_PER_MS
from firsttoken.core.request import EngineRequest, Request
from firsttoken.core.service import Targets
from firsttoken.kvcache import KVCache
from firsttoken.scheduler import TokenCap
from firsttoken.scheduler.admission import Admission
from firsttoken.simulate.gpu import model_gpu, packaged_table
from firsttoken.simulate.policies import find_policy
from firsttoken.simulate.run import GREEDY, KV_FORMAT, EngineShape, Inside, Outcome, simulate
from firsttoken.simulate.workload import Job
from tests.simulate.test_simulate_run import CAP, PRIOR, Fixed, at


def test_six_minutes_leave_nothing_behind() -> None:
    gpu = model_gpu(packaged_table("h200", "llama-3.1-8b"))
    # By default what is learned of returns, and who was evicted, goes on growing for half an hour.
    found = soak(synthetic(1), gpu, hours=0.1, seed=1, kv_blocks=6000, eviction="lru")
    assert found["pass"], found["checks"]
    assert found["rounds"] == 2
    assert found["preemptions"] > 0
    assert found["kv"]["evictions"] > 0
    assert min(found["answered"].get(name, 0) for name in ("finished", "left", "expired")) > 0
    assert any(name.startswith("overloaded") for name in found["answered"])


def test_each_round_has_prompts_of_its_own() -> None:
    jobs, round_s = repeated([at(0, 600, blocks=(3, 4)), at(2000, 512, blocks=(3,))], 300, seed=1)
    assert round_s == 122
    assert [job.blocks for job in jobs] == [(3, 4), (3,), (8, 9), (8,)]
    assert jobs[2].at_ns == 122 * 10**9


# ------------------------------------------------------------------ what a soak must find


def look(blocks: int = 1000, rss: float = 100.0, **sizes: int) -> Look:
    return Look(0.0, sizes, blocks, rss)


@pytest.mark.parametrize(
    ("last", "grew"),
    [
        (look(a=100), []),
        (look(a=622), []),
        (look(a=623), ["a"]),
        (look(b=600), ["b"]),
        (look(blocks=1021), ["python_blocks"]),
        (look(rss=165.0), ["rss_mib"]),
    ],
)
def test_what_grew_is_named(last: Look, grew: list[str]) -> None:
    checks = grown([look(a=100), last])
    assert [name for name, found in checks.items() if not found["pass"]] == grew


def inside() -> Inside:
    kv = KVCache(KV_FORMAT, 100, model="simulated")
    scheduler = find_policy("default", lambda _: TokenCap(64, 16), PRIOR).build(kv, max_num_seqs=4, max_model_len=1000)
    return Inside(scheduler, kv, Admission(Targets(), 4))


def request(number: int = 1) -> Request:
    return Request(EngineRequest(id=number, prompt=bytes(64), params=GREEDY, seed=0, max_tokens=4))


def test_an_engine_that_holds_something_is_not_at_rest() -> None:
    check(inside())
    leaks = (
        (lambda parts: parts.scheduler.add(request()), "1 requests wait"),
        (lambda parts: parts.kv.pool.take(1), "1 references but 0 owners"),
        (lambda parts: parts.admission.backlog.arrived(request()), "still counts waiting"),
    )
    for leak, says in leaks:
        parts = inside()
        leak(parts)
        with pytest.raises(AssertionError, match=says):
            check(parts)


def test_everything_that_is_held_is_counted() -> None:
    parts = inside()
    before = held(parts)
    for number in range(5):
        parts.scheduler.add(request(number))
    after = held(parts)
    assert after["Request objects"] == 5
    assert {after[name] - before.get(name, 0) for name in ("WaitingQueue._tickets", "Scheduler._tickets")} == {5}


# ------------------------------------------------------------------ callers who leave, in the simulator


def serve(jobs: list[Job], **shape: int) -> Outcome:
    engine = replace(EngineShape(kv_blocks=100, max_num_seqs=4, max_model_len=1000, in_flight=2), **shape)
    return simulate(jobs, find_policy("default", lambda _: CAP, PRIOR), engine, Fixed(), admission=True)


def test_callers_leave_waiting_and_running() -> None:
    patient = at(0, output=40)
    outcome = serve([patient, replace(patient, patience_ms=25), replace(patient, patience_ms=5)], max_num_seqs=2)
    assert outcome.left == 2
    assert len(outcome.classes["p2"].ttft_ms) == 1
    assert outcome.output_tokens < 60


def test_what_has_not_started_by_its_deadline_never_does() -> None:
    first = at(0, output=40)
    outcome = serve([first, replace(first, deadline_ms=100), replace(first, deadline_ms=1000)], max_num_seqs=1)
    assert (outcome.expired, outcome.left) == (1, 0)
    assert len(outcome.classes["p2"].ttft_ms) == 2


def test_rest_is_told_between_requests_and_at_the_end() -> None:
    seen: list[int] = []
    engine = EngineShape(kv_blocks=100, max_num_seqs=4, max_model_len=1000, in_flight=2)
    simulate(
        [at(10), at(1000)],
        find_policy("default", lambda _: CAP, PRIOR),
        engine,
        Fixed(),
        at_rest=lambda _, now_ns: seen.append(round(now_ns / NS_PER_MS)),
    )
    assert seen == [0, 41, 1031]
