"""Prometheus metrics, read back through the official parser."""

import os
import timeit
from math import inf

import pytest
from prometheus_client.parser import text_string_to_metric_families

from firsttoken.core.clock import now_ns
from firsttoken.observability.metrics import FrontendMetrics
from firsttoken.transport.messages import ClassStats, EngineInfo, EngineStats, StepTimeErrors

P1 = ("service_class", "p1")


def scrape(metrics):
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def test_gauges_and_totals_follow_the_latest_stats():
    metrics = FrontendMetrics()
    stats = EngineStats(
        steps=9, running=3, waiting=2, kv_total=100, kv_used=40, kv_cached=25, prompt_tokens=70,
        cached_prompt_tokens=16, output_tokens=55, preemptions=1, finished=6, aborted=5, failed=4,
    )  # fmt: skip
    metrics.update(stats)
    found = scrape(metrics)
    expected = {
        ("firsttoken_requests_running",): 3,
        ("firsttoken_requests_waiting",): 2,
        ("firsttoken_kv_blocks", ("state", "used")): 40,
        ("firsttoken_kv_blocks", ("state", "cached")): 25,
        ("firsttoken_kv_blocks", ("state", "free")): 35,
        ("firsttoken_kv_usage_ratio",): 0.4,
        ("firsttoken_steps_total",): 9,
        ("firsttoken_prompt_tokens_total",): 70,
        ("firsttoken_cached_prompt_tokens_total",): 16,
        ("firsttoken_output_tokens_total",): 55,
        ("firsttoken_preemptions_total",): 1,
    }
    assert {key: found[key] for key in expected} == expected
    assert metrics.stats is stats


def test_answers_are_counted_by_outcome():
    metrics = FrontendMetrics()
    outcomes = [
        ("firsttoken_requests_ended_total", ("outcome", name), P1) for name in ("finished", "aborted", "failed")
    ]
    assert [scrape(metrics)[key] for key in outcomes] == [0, 0, 0]  # all are there before anything ended
    metrics.of(1).started(9)
    metrics.of(1).ended("finished")
    metrics.of(1).ended("aborted", 5)
    metrics.of(1).ended("failed", 2)
    metrics.of(0).ended("failed", 7)
    found = scrape(metrics)
    assert found[("firsttoken_requests_started_total", P1)] == 9
    assert [found[key] for key in outcomes] == [1, 5, 2]


def test_every_class_has_its_queue_and_its_outlook():
    metrics = FrontendMetrics()
    refused = {"queue": 3, "ttft": 0}
    classes = [
        ClassStats(2, 7, refused, 0.05, inf), ClassStats(0, 0, {}, 0.0, 12.5), ClassStats(9, 1, {}, 4.0, None),
    ]  # fmt: skip
    metrics.update(EngineStats(classes=classes))
    found = scrape(metrics)
    prefix = ("service_class", "p0")
    assert found[("firsttoken_class_requests_waiting", prefix)] == 2
    assert found[("firsttoken_class_requests_running", prefix)] == 7
    assert found[("firsttoken_requests_turned_away_total", ("reason", "queue"), prefix)] == 3
    assert found[("firsttoken_requests_turned_away_total", ("reason", "ttft"), prefix)] == 0
    assert found[("firsttoken_predicted_time_to_first_token_seconds", ("service_class", "p2"))] == 4
    until = "firsttoken_seconds_until_target_missed"
    assert found[(until, prefix)] == inf
    assert found[(until, ("service_class", "p1"))] == 12.5
    assert (until, ("service_class", "p2")) not in found  # promised nothing


def test_predictions_of_step_times_show_how_far_they_were_off():
    metrics = FrontendMetrics()
    name = "firsttoken_step_time_error_ratio"
    assert all(key[0] != name for key in scrape(metrics)), "of steps that nobody has seen nothing is known"
    metrics.update(
        EngineStats(step_time_errors={"mixed": StepTimeErrors(7, 0.02, 0.25), "decode": StepTimeErrors(1, 0.5, 0.5)})
    )
    assert {key[1:]: value for key, value in scrape(metrics).items() if key[0] == name} == {
        (("kind", "mixed"), ("quantile", "0.5")): 0.02,
        (("kind", "mixed"), ("quantile", "0.9")): 0.25,
        (("kind", "decode"), ("quantile", "0.5")): 0.5,
        (("kind", "decode"), ("quantile", "0.9")): 0.5,
    }


def test_gauges_return_to_zero_with_a_heartbeat_alone():
    """After aborts no request need arrive for the gauges to fall."""
    metrics = FrontendMetrics()
    metrics.update(EngineStats(running=20, waiting=4, kv_total=100, kv_used=90, heartbeat_ns=now_ns()))
    metrics.update(EngineStats(kv_total=100, kv_cached=90, aborted=24, heartbeat_ns=now_ns()))
    found = scrape(metrics)
    assert found[("firsttoken_requests_running",)] == 0
    assert found[("firsttoken_requests_waiting",)] == 0
    assert found[("firsttoken_kv_blocks", ("state", "used"))] == 0
    assert found[("firsttoken_kv_usage_ratio",)] == 0
    assert 0 <= found[("firsttoken_engine_heartbeat_age_seconds",)] < 5


def test_before_the_first_stats_everything_is_zero():
    found = scrape(FrontendMetrics())
    assert found[("firsttoken_kv_usage_ratio",)] == 0
    assert found[("firsttoken_requests_running",)] == 0


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("first_token", "time_to_first_token"),
        ("request_done", "request_duration"),
        ("loop_lag", "event_loop_lag"),
    ],
)
def test_histograms(method, name):
    metrics = FrontendMetrics()
    of_all = method == "loop_lag"
    for seconds in (0.0004, 0.049, 10_000):
        getattr(metrics if of_all else metrics.of(1), method)(seconds)
    found = scrape(metrics)
    prefix, labels = f"firsttoken_{name}_seconds", [] if of_all else [P1]
    assert found[(f"{prefix}_count", *labels)] == 3
    assert found[(f"{prefix}_sum", *labels)] == pytest.approx(10_000.0494)
    assert found[(f"{prefix}_bucket", ("le", "0.05"), *labels)] == 2
    assert found[(f"{prefix}_bucket", ("le", "+Inf"), *labels)] == 3
    if not of_all:
        assert found[(f"{prefix}_count", ("service_class", "p2"))] == 0


def test_gaps_of_tokens_are_counted_a_step_at_a_time_and_at_an_answers_end():
    metrics = FrontendMetrics()
    gaps = metrics.of(1).gaps
    prefix = "firsttoken_inter_token_latency_seconds"
    for ns in (400_000, 49_000_000, 49_000_000):
        gaps.note(ns)
    assert scrape(metrics)[(f"{prefix}_count", P1)] == 0
    metrics.update(EngineStats())
    found = scrape(metrics)
    assert found[(f"{prefix}_count", P1)] == 3
    assert found[(f"{prefix}_sum", P1)] == pytest.approx(0.0984)
    assert found[(f"{prefix}_bucket", ("le", "0.0005"), P1)] == 1
    assert found[(f"{prefix}_bucket", ("le", "0.05"), P1)] == 3
    assert found[(f"{prefix}_count", ("service_class", "p2"))] == 0
    gaps.note(10**9)
    metrics.of(1).ended("finished")
    assert scrape(metrics)[(f"{prefix}_count", P1)] == 4


def test_servers_do_not_share_numbers():
    first, second = FrontendMetrics(), FrontendMetrics()
    first.request_over("refused", "unknown_field")
    first.of(1).gaps.note(100_000_000)
    first.update(EngineStats())
    refused = ("firsttoken_requests_refused_total", ("code", "unknown_field"), ("outcome", "refused"))
    assert scrape(first)[refused] == 1
    assert refused not in scrape(second)
    assert scrape(second)[("firsttoken_requests_refused_total", ("code", ""), ("outcome", "refused"))] == 0
    assert scrape(second)[("firsttoken_inter_token_latency_seconds_count", P1)] == 0


def test_info_and_processes():
    metrics = FrontendMetrics()
    metrics.set_info(
        EngineInfo(
            model='odd "name"\n',
            max_model_len=2048,
            vocab_size=9,
            max_num_seqs=4,
            kv_blocks=7,
            block_tokens=16,
            bytes_per_block=1,
            device="cpu",
            dtype="float32",
            quantization="none",
            kv_dtype="float32",
        )
    )
    metrics.watch_engine_process(os.getpid())
    found = scrape(metrics)
    info = next(dict(key[1:]) for key in found if key[0] == "firsttoken_engine_info")
    assert (info["model"], info["max_model_len"]) == ('odd "name"\n', "2048")
    assert found[("process_resident_memory_bytes",)] > 0
    assert found[("firsttoken_engine_process_resident_memory_bytes",)] > 0


def test_observing_is_cheap():
    gaps = FrontendMetrics().of(0).gaps

    def a_step() -> None:
        for _ in range(32):
            gaps.note(20_000_000)
        gaps.count()

    best = min(timeit.repeat(a_step, number=100, repeat=5))
    assert best / 3200 < 2.5e-6
