"""What ``/metrics`` of a server that has served known requests says, as Prometheus reads it."""

import asyncio
import time
import urllib.request

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from firsttoken.core.step_record import StepRecord
from firsttoken.observability.metrics import FrontendMetrics
from firsttoken.transport.kv_report import KVReport, PromptTokens, RestoreReport
from firsttoken.transport.messages import EngineInfo
from tests.server.conftest import forever, say

VLLM = {"model_name": "stub", "engine": "0"}
# What vLLM calls each, and its type there.
PROMISED = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_prefill_kv_computed_tokens": "histogram",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:cache_config_info": "gauge",
}


async def scrape(client, serve_http):
    """By HTTP, from a real server."""
    async with serve_http(client.app) as url:
        reply = await asyncio.to_thread(urllib.request.urlopen, f"{url}/metrics", timeout=5)
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        return {family.name: family for family in text_string_to_metric_families(reply.read().decode())}


def value(families, name, **labels):
    """Of the one sample with these labels and no others but ``le``'s."""
    found = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


async def test_vllms_names_have_vllms_labels_types_and_meaning(make_client, serve_http):
    async with make_client(say("Hello"), step_s=0.01, cached_tokens=3) as client:
        for _ in range(2):  # five letters and an end token each, of a prompt of seven
            assert (await client.complete("prompts")).status == 200
        assert (await client.complete("prompts", max_tokens=2, n=2)).status == 200
        await client.quiet()
        families = await scrape(client, serve_http)
    assert {name: families[name].type for name in PROMISED} == PROMISED
    for name in PROMISED:
        for sample in families[name].samples:
            assert VLLM.items() <= sample.labels.items() or name == "vllm:cache_config_info"
    told = dict.fromkeys(("stop", "length", "abort", "error"), 0)
    for reason in told:
        told[reason] = value(families, "vllm:request_success_total", finished_reason=reason, **VLLM)
    assert told == {"stop": 2, "length": 2, "abort": 0, "error": 0}
    assert value(families, "vllm:prompt_tokens_total", **VLLM) == 28
    assert value(families, "vllm:prompt_tokens_cached_total", **VLLM) == 12
    assert value(families, "vllm:generation_tokens_total", **VLLM) == 2 * 6 + 2 * 2
    assert value(families, "vllm:num_requests_running", **VLLM) == 0
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert value(families, f"vllm:{name}_seconds_count", **VLLM) == 3
    assert value(families, "vllm:inter_token_latency_seconds_count", **VLLM) == 2 * 5 + 2 * 1
    assert value(families, "vllm:request_prompt_tokens_sum", **VLLM) == 7 * 3
    assert value(families, "vllm:request_generation_tokens_sum", **VLLM) == 2 * 6 + 4
    assert value(families, "vllm:request_prefill_kv_computed_tokens_sum", **VLLM) == 4 * 3
    assert value(families, "vllm:request_generation_tokens_bucket", le="5.0", **VLLM) == 1
    # A step takes 10 ms: the first token comes with the first, each further one with the next.
    decode = value(families, "vllm:request_decode_time_seconds_sum", **VLLM)
    assert 2 * 0.05 + 0.01 <= decode < 2
    prefill = value(families, "vllm:request_prefill_time_seconds_sum", **VLLM)
    assert value(families, "vllm:request_inference_time_seconds_sum", **VLLM) == pytest.approx(decode + prefill)
    assert 3 * 0.01 <= value(families, "vllm:request_time_per_output_token_seconds_sum", **VLLM) < 1
    config = families["vllm:cache_config_info"].samples[0].labels
    assert {"block_size": "16", "engine": "0", "enable_prefix_caching": "True"}.items() <= config.items()


async def test_one_histogram_is_given_under_two_names(make_client, serve_http):
    """Classes are told apart under ours, and added up under vLLM's."""
    async with make_client(say("Hi")) as client:
        for tier in ("p0", "p1", "p1", "p2"):
            assert (await client.complete("a", service_tier=tier)).status == 200
        families = await scrape(client, serve_http)
    ours, theirs = "firsttoken_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"
    counts = [value(families, f"{ours}_count", service_class=name) for name in ("p0", "p1", "p2")]
    assert counts == [1, 2, 1]
    assert value(families, f"{theirs}_count", **VLLM) == 4
    of_classes = [value(families, f"{ours}_sum", service_class=name) for name in ("p0", "p1", "p2")]
    assert value(families, f"{theirs}_sum", **VLLM) == pytest.approx(sum(of_classes))
    buckets = [s for s in families[theirs].samples if s.name.endswith("_bucket")]
    assert [s.value for s in buckets] == sorted(s.value for s in buckets)
    assert (buckets[-1].labels["le"], buckets[-1].value) == ("+Inf", 4)


async def test_aborted_and_failed_answers_have_their_reason(make_client, serve_http):
    async with make_client(forever, step_s=0.005) as client:
        call = client.start("/v1/completions", {"prompt": "hi", "max_tokens": 1000, "stream": True})
        await call.first_byte.wait()
        call.leave()
        await call.task
        await client.quiet()
        families = await scrape(client, serve_http)
    assert value(families, "vllm:request_success_total", finished_reason="abort", **VLLM) == 1
    assert value(families, "vllm:request_queue_time_seconds_count", **VLLM) == 0  # of those that finished
    # Its time in the queue and in decoding is told all the same.
    assert value(families, "firsttoken_request_stage_seconds_count", stage="queue", service_class="p2") == 1
    assert value(families, "firsttoken_request_stage_seconds_count", stage="decode", service_class="p2") == 1


async def test_stages_of_all_requests_sum_to_their_time(make_client, serve_http):
    async with make_client(say("Hello"), step_s=0.005) as client:
        totals = []
        for _ in range(3):
            exchange = client.start("/v1/completions", {"prompt": "hi"}, headers={"x-request-id": "known"})
            await exchange.task
            ended = client.llm.recent.get("known")
            totals.append((ended.ended_ns - ended.received_ns) / 1e9)
        families = await scrape(client, serve_http)
    stages = {
        s.labels["stage"]: s.value for s in families["firsttoken_request_stage_seconds"].samples if "_sum" in s.name
    }
    assert {"parse", "queue", "prefill", "decode", "transport", "detokenize", "write"} <= stages.keys()
    assert sum(stages.values()) == pytest.approx(sum(totals), rel=1e-6)


async def test_what_requests_waited_for_adds_up_to_their_time_in_the_queue(make_client, serve_http):
    async with make_client(say("Hello"), step_s=0.005, max_num_seqs=1) as client:
        await asyncio.gather(*(client.complete("hi", service_tier="p1") for _ in range(3)))
        families = await scrape(client, serve_http)
    waits = {s.labels["reason"]: s.value for s in families["firsttoken_queue_wait_seconds"].samples}
    assert {"slot", "kv", "budget", "restore", "order", "window", "step"} <= waits.keys()
    queued = value(families, "firsttoken_request_stage_seconds_sum", stage="queue", service_class="p1")
    assert sum(waits.values()) == pytest.approx(queued, rel=0.05, abs=1e-3)
    assert queued > 0.02, "two of them waited for the first to end"


async def test_a_refused_request_is_in_no_series_of_requests(make_client, serve_http):
    async with make_client() as client:
        assert (await client.complete("hi", temperature=-1)).status == 400
        families = await scrape(client, serve_http)
    assert families["firsttoken_request_stage_seconds"].samples == []
    assert value(families, "vllm:request_prompt_tokens_count", **VLLM) == 0


async def test_steps_are_told_by_kind(make_client, serve_http):
    async with make_client(say("Hello"), step_s=0.002, heartbeat_s=0.05) as client:
        await client.complete("prompts")
        await asyncio.sleep(0.2)  # the last records come with a heartbeat
        families = await scrape(client, serve_http)
    kinds = {
        kind: value(families, "firsttoken_step_seconds_count", kind=kind) for kind in ("prefill", "decode", "mixed")
    }
    assert kinds == {"prefill": 1, "decode": 5, "mixed": 0}
    assert value(families, "firsttoken_step_tokens_total", kind="prefill") == 7
    assert value(families, "firsttoken_step_tokens_total", kind="decode") == 5
    assert value(families, "vllm:iteration_tokens_total_sum", **VLLM) == 12
    assert value(families, "firsttoken_step_part_seconds_total", part="compute") >= 6 * 0.002


def test_padding_copies_and_pauses_are_summed():
    metrics = FrontendMetrics()
    step = StepRecord(
        1, 1000, 3000, 10_000, 50_000, 60_000, decode_rows=3, prefill_tokens=5, pad_tokens=8, gc_ns=7000,
        run_queue_ns=9000, copied_bytes_in=4096, copied_bytes_out=512, copy_ns=11_000,
    )  # fmt: skip
    metrics.steps.add([step, step])
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    assert value(families, "firsttoken_step_tokens_total", kind="padding") == 16
    parts = {s.labels["part"]: s.value for s in families["firsttoken_step_part_seconds"].samples}
    expected = {"plan": 2, "wait": 7, "compute": 40, "harvest": 10, "gc": 7, "run_queue": 9, "copy": 11}
    assert parts == pytest.approx({part: 2 * us / 1e6 for part, us in expected.items()})
    assert value(families, "firsttoken_kv_copied_bytes_total", direction="in") == 8192
    assert value(families, "firsttoken_step_seconds_count", kind="mixed") == 2


def test_lower_tiers_are_vllms_external_cache():
    metrics = FrontendMetrics()
    tokens = PromptTokens(device=[10, 0], host=[5, 0], disk=[0, 2], missed=[3, 4])
    none = PromptTokens(device=[0, 0], host=[0, 0], disk=[0, 0], missed=[0, 0])
    restores = RestoreReport(**dict.fromkeys(RestoreReport.__struct_fields__, 0))
    report = KVReport(
        edges=[0, 64], tokens=[tokens, none, none], misses={}, evictions=[[0] * 3] * 3, evicted_blocks=0,
        evicted_early=[0] * 3, evicted_kept=0, hints_kept=0, hints_ignored=0, kept_blocks=0,
    )  # fmt: skip
    info = EngineInfo(
        model="m", max_model_len=1, vocab_size=1, max_num_seqs=1, kv_blocks=1, block_tokens=16, bytes_per_block=1,
        device="cpu", dtype="f", quantization="none", kv_dtype="f",
    )  # fmt: skip
    metrics.set_info(info, "served")
    named = {"model_name": "served", "engine": "0"}
    for lower in (False, True):
        metrics.update_kv(msgspec.structs.replace(report, restores=restores if lower else None))
        text = metrics.render().decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert value(families, "vllm:prefix_cache_queries_total", **named) == (22 if lower else 17)
        assert value(families, "vllm:prefix_cache_hits_total", **named) == 10
        assert ("vllm:external_prefix_cache_hits" in families) == lower
    assert value(families, "vllm:external_prefix_cache_queries_total", **named) == 12
    assert value(families, "vllm:external_prefix_cache_hits_total", **named) == 5


def test_before_the_start_there_is_no_model_to_name():
    text = FrontendMetrics().render().decode()
    assert "vllm:" not in text


async def test_every_name_and_label_is_one_that_prometheus_takes(make_client, serve_http):
    """The parser is lenient; Prometheus refuses a whole scrape for a name that is there twice."""
    async with make_client(say("Hello")) as client:
        await client.chat("hi")
        async with serve_http(client.app) as url:
            text = (await asyncio.to_thread(urllib.request.urlopen, f"{url}/metrics", timeout=5)).read().decode()
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    samples = [line.rpartition(" ")[0] for line in text.splitlines() if line and not line.startswith("#")]
    assert len(samples) == len(set(samples))


async def test_all_who_ask_at_once_get_one_answer(client, monkeypatch):
    render, made = client.llm.metrics.render, []

    def slow():
        made.append(time.sleep(0.05))
        return render()

    monkeypatch.setattr(client.llm.metrics, "render", slow)
    calls = [client.start("/metrics", method="GET") for _ in range(20)]
    await asyncio.sleep(0.01)
    calls[0].task.cancel()  # whoever asked first may leave
    await asyncio.wait([call.task for call in calls], timeout=5)
    assert {call.reply.status for call in calls[1:]} == {200}
    assert len(made) == 1
    assert b"firsttoken_requests_started_total" in (await client.get("/metrics")).body
    assert len(made) == 2
