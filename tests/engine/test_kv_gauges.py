"""What the engine tells of its KV cache: every prompt token once, at little cost, and nothing of other tenants."""

from __future__ import annotations

import logging
import time
import timeit
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.core.clock import NS_PER_MS
from firsttoken.core.retention import Retention
from firsttoken.engine.kv_gauges import LOG_NS, REPORT_NS, KVGauges
from firsttoken.engine.prompt_tokens import EDGES, TokenHeat
from firsttoken.kvcache import KVCache
from firsttoken.transport.kv_report import KVReport
from firsttoken.transport.messages import Abort, StepOutputs
from tests.support.kv import make_cache, make_request, run_through
from tests.support.scripted_engine import Engine, ask, count_up


def test_tokens_lie_where_their_positions_are() -> None:
    heat = TokenHeat()
    heat.add(1, 500, 100, 500, 5000)
    heat.add(1, 0, 0, 0, 1)
    heat.add(0, 300_000, 0, 0, 300_001)
    p0, p1, p2 = heat.read()
    assert p1.device == [500, *[0] * 9]
    assert p1.host == [12, 88, *[0] * 8]
    assert p1.disk == [0, 424, 76, *[0] * 7]
    assert p1.missed == [1, 0, 2048 - 1100, 2048, 5000 - 4096, *[0] * 5]
    assert p0.device[-1] == 300_000 - EDGES[-1]
    assert (p0.missed[-1], sum(p0.missed)) == (1, 1)
    assert not any(sum(counts) for counts in msgspec.structs.astuple(p2))


@given(st.lists(st.tuples(*[st.integers(0, 3000)] * 4), max_size=5))
def test_no_token_is_lost_or_counted_twice(prompts: list[tuple[int, int, int, int]]) -> None:
    heat = TokenHeat()
    for device, host, disk, missed in prompts:
        heat.add(2, device, host, disk, device + host + disk + missed)
    counts = msgspec.structs.astuple(heat.read()[2])
    assert [sum(kind) for kind in counts] == [sum(prompt[kind] for prompt in prompts) for kind in range(4)]


# ------------------------------------------------------------------ when, and at what cost


def test_it_is_told_at_most_ten_times_a_second_and_when_it_has_changed() -> None:
    cache = make_cache(16)
    gauges = KVGauges(cache)
    now = 10**9
    assert gauges.read(now) is not None
    run_through(cache, make_request(1, [1] * 9))
    assert gauges.read(now + REPORT_NS - 1) is None
    report = gauges.read(now + REPORT_NS)
    assert report is not None
    assert report.misses == {"never_seen": 1, "evicted": 0, "diverged": 0, "all_positions": 0}
    assert gauges.read(now + 2 * REPORT_NS) is None, "nothing has changed"
    assert REPORT_NS >= 100 * NS_PER_MS


def test_a_step_without_report_costs_next_to_nothing() -> None:
    gauges = KVGauges(make_cache(16))
    gauges.read(10**9)
    best = min(timeit.repeat(lambda: gauges.read(10**9 + 1), number=2000, repeat=5)) / 2000
    assert best < 2e-6


# ------------------------------------------------------------------ whose prompts they were


def test_that_another_tenant_sends_the_same_is_for_the_log_alone(caplog: Any) -> None:
    def told_after(salt: str) -> tuple[KVReport, KVCache]:
        cache = make_cache(32)
        gauges = KVGauges(cache)
        run_through(cache, make_request(1, [1] * 9, salt))
        run_through(cache, make_request(2, [2] * 9, "b"))
        run_through(cache, make_request(3, [1] * 9, "b"))
        report = gauges.read(LOG_NS)
        assert report is not None
        return report, cache

    with caplog.at_level(logging.INFO, "firsttoken.engine.kv_gauges"):
        unseen, cache = told_after("a")
        assert cache.stats().other_salt == 1
        assert "computed anew: 1 so far" in caplog.text
        caplog.clear()
        apart, cache = told_after("c")
        assert cache.stats().other_salt == 1
    assert unseen == apart
    assert "other_salt" not in str(msgspec.to_builtins(unseen))


# ------------------------------------------------------------------ through the loop


def report_of(engine: Engine, prompt_tokens: int) -> KVReport:
    """The first that tells of so many prompt tokens."""
    while engine.kv is None or prompt_tokens_of(engine.kv) < prompt_tokens:
        message = engine.messages.get(timeout=10)
        if isinstance(message, StepOutputs) and message.kv is not None:
            engine.kv = message.kv
    return engine.kv


def prompt_tokens_of(report: KVReport) -> int:
    return sum(sum(kind) for tokens in report.tokens for kind in msgspec.structs.astuple(tokens))


@pytest.mark.parametrize("seqs", [1, 4])
def test_found_and_missed_are_all_tokens_of_all_prompts_that_started(start: Any, depth: int, seqs: int) -> None:
    engine = start(count_up, depth=depth, seqs=seqs, blocks=40, step_s=0.001)
    prompt = list(range(50))
    engine.submit(ask(1, prompt, service=0))
    engine.collect([1])
    engine.submit(
        *(ask(i, [*prompt, *[1000 + i] * i], service=i % 3) for i in range(2, 12)), ask(12, [7] * 60, max_tokens=90)
    )
    engine.client.send(Abort([12]))
    _, last, stats = engine.collect(range(2, 13))
    report = report_of(engine, stats.prompt_tokens)
    found = sum(sum(tokens.device) for tokens in report.tokens)
    missed = sum(sum(tokens.missed) for tokens in report.tokens)
    assert (found, found + missed) == (stats.cached_prompt_tokens, stats.prompt_tokens)
    assert found >= 10 * 48
    assert sum(report.tokens[0].device) == 48 * 3, "requests 3, 6 and 9"
    assert not any(sum(tokens.host) + sum(tokens.disk) for tokens in report.tokens)
    assert (report.restores, report.disk) == (None, None)
    assert last[2].cached_tokens == 48


def test_a_prompt_that_is_aborted_half_way_counts(start: Any, depth: int) -> None:
    engine = start(count_up, depth=depth, step_s=0.1)
    engine.submit(ask(1, range(200)))  # of which a step computes 64
    time.sleep(0.15)
    engine.client.send(Abort([1]))
    tokens, last, stats = engine.collect([1])
    assert (tokens[1], last[1].finish_reason, stats.prompt_tokens) == ([], "abort", 200)
    assert sum(report_of(engine, 200).tokens[2].missed) == 200


def test_hints_are_granted_and_refused_through_the_loop(start: Any, depth: int) -> None:
    engine = start(count_up, depth=depth, blocks=40)
    wish = Retention(3600 * 10**9)
    for number, length, tokens, kept in ((1, 100, 30, True), (2, 200, 30, False), (3, 8, 3, False)):
        request = msgspec.structs.replace(ask(number, [number] * length, max_tokens=tokens), retention=wish)
        engine.submit(request)
        _, last, _ = engine.collect([number])
        assert last[number].kept is kept, number
    engine.submit(ask(4, [4] * 20))
    assert engine.collect([4])[1][4].kept is None
    report = report_of(engine, 328)
    assert (report.hints_kept, report.hints_ignored) == (1, 2)
    assert report.kept_blocks == 129 // 16, "prompt and answer, but for the last token"
