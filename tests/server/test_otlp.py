"""A server that exports to real OTLP receivers: over HTTP and gRPC, and what a bad collector costs (nothing)."""

import asyncio
import os
import signal
import socket
import time
from contextlib import asynccontextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from firsttoken.observability.otlp import export as export_module
from firsttoken.observability.otlp.export import OtlpExport
from firsttoken.observability.otlp.settings import OtlpSettings
from firsttoken.server.exporting import exporting
from tests.server.conftest import forever, say
from tests.support.otlp_receiver import attributes, grpc_receiver, http_receiver
from tests.support.stub_process import Server

RECEIVERS = {"http": http_receiver, "grpc": grpc_receiver}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exported(make_client):
    """``async with exported(settings, script, **options) as client``: a server that exports."""

    @asynccontextmanager
    async def make(settings, *args, **options):
        async with make_client(*args, **options) as client, exporting(settings, client.llm):
            yield client

    return make


def fast(protocol, url, **changes):
    return OtlpSettings(protocol, protocol, url, spans_every_s=0.05, metrics_every_s=0.2, **changes)


def figures(client):
    families = text_string_to_metric_families(client.llm.metrics.render().decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


async def until(true, timeout_s=15.0):
    async with asyncio.timeout(timeout_s):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("protocol", RECEIVERS)
async def test_a_request_arrives_as_spans_and_metrics(exported, protocol):
    with RECEIVERS[protocol]() as got:
        async with exported(fast(protocol, got.url), say("Hello"), step_s=0.01, cached_tokens=3) as client:
            before = time.time_ns()
            reply = await client.post(
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "hi"}], "timings": True, "service_tier": "p1"},
                headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"},
            )
            after = time.time_ns()
            await until(lambda: got.spans and any(m.name.startswith("gen_ai.server.request") for m in got.metrics))
            await until(lambda: figures(client)["firsttoken_otlp_spans_total", "sent"])
            sent = figures(client)["firsttoken_otlp_spans_total", "sent"]
    assert "traceparent" not in reply.headers
    (root,) = [span for span in got.spans if span.name == "chat stub"]
    stages = [span for span in got.spans if span is not root]
    assert sent == len(got.spans)
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert {span.parent_span_id for span in stages} == {root.span_id}
    assert {span.trace_id for span in stages} == {root.trace_id}
    assert before - 1e6 <= root.start_time_unix_nano <= root.end_time_unix_nano <= after + 1e6
    told = attributes(root)
    assert told["gen_ai.response.id"] == reply.json["id"]
    assert told["gen_ai.usage.input_tokens"] == reply.json["usage"]["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == 6
    assert told["gen_ai.response.finish_reasons"] == ["stop"]
    assert told["firsttoken.request.id"] == "mine"
    # The stages are those of the caller's own account, but for the writing that came after it.
    timings = reply.json["timings"]
    taken = dict.fromkeys((span.name for span in stages), 0.0)
    for span in stages:
        taken[span.name] += (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
    for stage in ("parse", "template", "tokenize", "transport", "queue", "prefill", "decode", "detokenize"):
        assert taken[stage] == pytest.approx(timings[f"{stage}_ms"], abs=1e-3), stage
    assert sum(taken.values()) == pytest.approx((root.end_time_unix_nano - root.start_time_unix_nano) / 1e6, abs=1e-3)
    (event,) = root.events
    assert root.start_time_unix_nano < event.time_unix_nano < root.end_time_unix_nano
    assert got.resources[0]["service.name"] == "firsttoken"
    _check_metrics({metric.name: metric for metric in got.metrics}, timings)


def _check_metrics(metrics, timings):
    (point,) = metrics["gen_ai.server.request.duration"].histogram.data_points
    assert attributes(point) == {
        "gen_ai.provider.name": "firsttoken",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "stub",
        "firsttoken.service_class": "p1",
    }
    assert point.count == sum(point.bucket_counts) == 1
    assert timings["total_ms"] / 1000 <= point.sum < 2
    assert metrics["gen_ai.server.request.duration"].unit == "s"
    (point,) = metrics["gen_ai.server.time_per_output_token"].histogram.data_points
    assert point.sum == pytest.approx(timings["itl_ms"]["mean"] / 1000, abs=1e-6)
    (point,) = metrics["gen_ai.server.time_to_first_token"].histogram.data_points
    assert 0.01 <= point.sum < 1
    prompt_tokens = metrics["firsttoken_prompt_tokens"].sum
    assert prompt_tokens.is_monotonic
    assert prompt_tokens.data_points[0].as_double > 0
    assert prompt_tokens.data_points[0].start_time_unix_nano < prompt_tokens.data_points[0].time_unix_nano
    assert metrics["firsttoken_requests_running"].gauge.data_points[0].as_double == 0
    assert not any(":" in name for name in metrics)


async def test_what_the_environment_says_is_honoured(exported, monkeypatch):
    with http_receiver() as got:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{got.url}/v1/traces")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret,x-team=llm")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "support-bot")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.instance.id=pod-7")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        async with exported(OtlpSettings("http", None, "", 0.05), say("Hi")) as client:
            body = {"prompt": "hi"}
            assert (await client.post("/v1/completions", body)).status == 200
            sampled = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            assert (await client.post("/v1/completions", body, headers=sampled)).status == 200
            await until(lambda: got.spans)
    assert {span.trace_id.hex() for span in got.spans} == {TRACE}, "only what the caller sampled"
    assert got.metrics == []
    resource = got.resources[0]
    assert resource["service.name"] == "support-bot"
    assert resource["deployment.environment.name"] == "test"
    assert resource["service.instance.id"] == "pod-7"
    assert got.headers[0]["authorization"] == "Bearer secret"
    assert got.headers[0]["content-encoding"] == "gzip"


async def test_all_that_is_left_is_sent_at_the_end(exported):
    with http_receiver() as got:
        async with exported(OtlpSettings("http", "http", got.url, 60, 60), say("Hi")) as client:
            await client.complete("hi")
            await until(lambda: client.llm.recent.latest(1))
        assert sum(span.name.startswith("text_completion") for span in got.spans) == 1
        assert any(metric.name == "firsttoken_output_tokens" for metric in got.metrics)


async def test_aborted_and_refused_requests_are_exported_too(exported):
    with http_receiver() as got:
        async with exported(fast("http", got.url), forever, step_s=0.005) as client:
            call = client.start("/v1/completions", {"prompt": "hi", "max_tokens": 1000, "stream": True})
            await call.first_byte.wait()
            call.leave()
            await call.task
            assert (await client.complete("hi", temperature=-1)).status == 400
            await until(lambda: sum("firsttoken.outcome" in attributes(span) for span in got.spans) == 2)
    told = {
        attributes(span)["firsttoken.outcome"]: span for span in got.spans if "firsttoken.outcome" in attributes(span)
    }
    assert attributes(told["aborted"])["error.type"] == "client_disconnected"
    assert attributes(told["refused"])["http.response.status_code"] == 400
    children = [span.name for span in got.spans if span.parent_span_id == told["refused"].span_id]
    assert children
    assert "queue" not in children


async def serve_some(client, count=20):
    """How long requests take, in seconds, while exporting goes badly; the loop must turn all the while."""
    took = []
    for _ in range(count):
        began = time.monotonic()
        assert (await client.complete("hi")).status == 200
        took.append(time.monotonic() - began)
    return sorted(took)[count // 2]


async def test_a_collector_that_is_down_costs_spans_and_nothing_else(exported):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and not listened on
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        async with exported(fast("http", url), say("Hi")) as client:
            assert await serve_some(client) < 0.5
            began = time.monotonic()
        assert time.monotonic() - began < 4.5, "the end waits for what cannot be sent no longer than it says"
    assert client.llm.recent.latest(1)


@pytest.mark.parametrize("protocol", ["http"])
async def test_a_collector_that_refuses_is_told_once_and_counted(exported, protocol, caplog):
    with RECEIVERS[protocol]() as got:
        got.status = 403
        async with exported(fast(protocol, got.url), say("Hi")) as client:
            await serve_some(client, 5)
            await until(lambda: figures(client)["firsttoken_otlp_spans_total", "failed"] > 0)
            await until(lambda: figures(client)["firsttoken_otlp_metric_exports_total", "failed"] > 1)
            warned = [record.getMessage() for record in caplog.records if "exporting to" in record.getMessage()]
            assert len(warned) == 1
            assert got.url in warned[0]
            assert "403" in warned[0]
            got.status = 200
            await client.complete("hi")
            await until(lambda: got.spans)
            await until(lambda: figures(client)["firsttoken_otlp_spans_total", "sent"] > 0)


async def test_a_slow_collector_holds_nothing_up(exported):
    with http_receiver() as got:
        got.answer_s = 30.0
        async with exported(fast("http", got.url), say("Hi")) as client:
            assert await serve_some(client) < 0.5
            began = time.monotonic()
        assert time.monotonic() - began < 4.5


async def test_requests_for_which_there_is_no_room_are_counted(make_client):
    async with make_client(say("Hi")) as client:
        export = OtlpExport(fast("http", "http://127.0.0.1:9"), client.llm.metrics.registry, queue_requests=3)
        client.llm.recent.subscribe(export.offer)  # and nobody takes them out
        for _ in range(5):
            await client.complete("hi")
        await until(lambda: len(client.llm.recent.latest(9)) == 5)
        assert export.dropped == 2
        assert figures(client)["firsttoken_otlp_requests_dropped_total",] == 2


async def test_another_process_follows_one_that_ended(exported, monkeypatch, caplog):
    monkeypatch.setattr(export_module, "_RESTART_S", 0.1)
    with http_receiver() as got:
        async with exported(fast("http", got.url), say("Hi")) as client:
            await client.complete("hi")
            await until(lambda: got.spans)
            seen = len(got.spans)
            await until(lambda: figures(client)["firsttoken_otlp_spans_total", "sent"] == seen)
            for child in _children():
                os.kill(child, signal.SIGKILL)
            await until(lambda: "another follows" in caplog.text)
            await client.complete("hi")
            await until(lambda: len(got.spans) == 2 * seen)
            await until(lambda: figures(client)["firsttoken_otlp_spans_total", "sent"] >= 2 * seen)
        assert _children() == []


async def test_one_that_cannot_be_started_is_tried_again_and_what_could_not_be_handed_over_is_counted(
    exported, monkeypatch, caplog
):
    monkeypatch.setattr(export_module, "_RESTART_S", 0.1)
    start, full = export_module.subprocess.Popen, [True]

    def popen(*args, **options):
        if full[0]:
            raise OSError(24, "Too many open files")
        return start(*args, **options)

    with http_receiver() as got:
        async with exported(fast("http", got.url), say("Hi")) as client:
            files = len(os.listdir("/proc/self/fd"))
            monkeypatch.setattr(export_module.subprocess, "Popen", popen)
            for child in _children():
                os.kill(child, signal.SIGKILL)
            await until(lambda: caplog.text.count("Too many open files") > 3)
            assert len(os.listdir("/proc/self/fd")) <= files
            full[0] = False
            await client.complete("hi")
            await until(lambda: got.spans)


async def test_what_could_not_be_handed_over_is_counted(exported, monkeypatch, caplog):
    record = export_module._record
    with http_receiver() as got:
        async with exported(fast("http", got.url), say("Hi")) as client:
            monkeypatch.setattr(export_module, "_record", lambda ended: 1 / 0)
            await client.complete("hi")
            await until(lambda: figures(client)["firsttoken_otlp_requests_dropped_total",] == 1)
            assert "something could not be exported" in caplog.text
            monkeypatch.setattr(export_module, "_record", record)
            await client.complete("hi")
            await until(lambda: got.spans)


@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_serving_process_sends_what_is_left_when_it_is_told_to_stop(by, monkeypatch):
    with http_receiver() as got:
        if by == "environment":
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", got.url)
        server = Server(**({"otlp_endpoint": got.url} if by == "option" else {}))
        try:
            assert server.ask("POST", "/v1/completions", {"prompt": "hi", "max_tokens": 3}).status == 200
            server.signal(signal.SIGTERM)
            assert server.wait(20) == 0
        finally:
            server.process.kill()
            server.process.communicate()
    assert sum(span.name == "text_completion stub" for span in got.spans) == 1
    assert any(metric.name == "firsttoken_output_tokens" for metric in got.metrics)


def _children():
    """Processes of this one that export."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        pids = [int(pid) for pid in file.read().split()]
    found = []
    for pid in pids:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if b"observability.otlp.process" in file.read():
                found.append(pid)
    return found
