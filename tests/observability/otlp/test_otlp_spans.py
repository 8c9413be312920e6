"""The spans of a request: the caller's parent, stages at their real times, attributes, errors."""

import logging
import threading

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode

from firsttoken.core.timeline import Mark
from firsttoken.observability.otlp import process as process_module
from firsttoken.observability.otlp.process import Collected, Exporting, LastError
from firsttoken.observability.otlp.settings import OtlpSettings
from firsttoken.observability.otlp.spans import FIRST_TOKEN, record_request
from firsttoken.observability.otlp.wire import RequestRecord, Requests
from tests.support.otlp_receiver import http_receiver

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
MS = 1_000_000
BEGAN, UNIX = 5_000 * MS, 1_700_000_000_000 * MS
WAY = (
    Mark.RECEIVED, Mark.PARSED, Mark.TEMPLATED, Mark.TOKENIZED, Mark.ARRIVED, Mark.SCHEDULED, Mark.FIRST_TOKEN,
    Mark.PREEMPTED, Mark.SCHEDULED, Mark.FIRST_TOKEN, Mark.FINISHED, Mark.DELIVERED, Mark.DETOKENIZED, Mark.WRITTEN,
)  # fmt: skip


def record(**fields):
    timeline = tuple((int(mark), BEGAN + index * index * MS) for index, mark in enumerate(WAY))
    account = {
        "queue_reasons": {"slot": 9.0, "kv": 11.0, "budget": 0.0},
        "cached_tokens": {"device": 16, "host": 0, "disk": 0},
        "miss": {"position": 16, "reason": "never_seen"},
        "itl_ms": {"p50": 2.0, "max": 9.0},
        "worst_gap": {"ms": 9.0, "step": 7, "cause": "gc"},
        "prefill_steps": 2,
        "decode_steps": 5,
        "preemptions": 1,
        "unaccounted_ms": 0.0,
    }
    known = RequestRecord(
        id="req-1", response_id="chatcmpl-1", route="/v1/chat/completions", model="smollm2", outcome="finished",
        status=200, error="", finish_reason="stop", service_class="p1", answers=1, prompt_tokens=20, cached_tokens=16,
        output_tokens=6, received_unix_ns=UNIX, received_ns=BEGAN, ended_ns=timeline[-1][1], ttft_ns=36 * MS,
        timeline=timeline, account=account, traceparent="", tracestate="",
    )  # fmt: skip
    return msgspec.structs.replace(known, **fields)


def spans_of(record, sampler=None):
    collected = Collected()
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(collected)
    record_request(provider.get_tracer("test"), record)
    return collected.take()


def test_stages_are_children_that_follow_one_another_from_the_first_byte_to_the_last():
    *stages, root = spans_of(record())
    assert root.kind is SpanKind.SERVER
    assert root.name == "chat smollm2"
    assert root.parent is None
    assert (root.start_time, root.end_time) == (UNIX, UNIX + 169 * MS)
    assert [one.name for one in stages] == [
        "parse", "template", "tokenize", "transport", "queue", "prefill", "decode", "queue", "prefill", "decode",
        "transport", "detokenize", "write",
    ]  # fmt: skip
    assert {one.parent.span_id for one in stages} == {root.context.span_id}
    assert {one.context.trace_id for one in stages} == {root.context.trace_id}
    edges = [UNIX, *(one.end_time for one in stages)]
    assert [one.start_time for one in stages] == edges[:-1]
    assert edges[-1] == root.end_time
    assert sum(one.end_time - one.start_time for one in stages) == root.end_time - root.start_time


def test_the_first_token_is_an_event_of_the_request():
    (event,) = spans_of(record())[-1].events
    assert (event.name, event.timestamp) == (FIRST_TOKEN, UNIX + 36 * MS)
    assert event.attributes["gen_ai.server.time_to_first_token"] == 0.036
    assert spans_of(record(ttft_ns=None))[-1].events == ()


def test_attributes_follow_the_conventions_for_generative_ai():
    *stages, root = spans_of(record())
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "firsttoken",
        "gen_ai.request.model": "smollm2",
        "gen_ai.response.model": "smollm2",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "firsttoken.request.id": "req-1",
        "firsttoken.service_class": "p1",
        "firsttoken.preemptions": 1,
    }
    assert expected.items() <= dict(root.attributes).items()
    assert "error.type" not in root.attributes
    assert root.status.status_code is StatusCode.UNSET
    queue, queue_again = (one for one in stages if one.name == "queue")
    assert dict(queue.attributes) == {"firsttoken.queue.slot_ms": 9.0, "firsttoken.queue.kv_ms": 11.0}
    assert dict(queue_again.attributes) == {}, "the sums of the account are told once"
    prefill = next(one for one in stages if one.name == "prefill")
    assert prefill.attributes["firsttoken.cached_tokens.device"] == 16
    assert prefill.attributes["firsttoken.cache_miss.reason"] == "never_seen"
    assert prefill.attributes["firsttoken.prefill_steps"] == 2
    decode = next(one for one in stages if one.name == "decode")
    assert decode.attributes["firsttoken.worst_gap.cause"] == "gc"
    assert decode.attributes["firsttoken.itl_ms.max"] == 9.0


def test_completions_have_another_operation_and_outside_http_there_is_none_of_it():
    root = spans_of(record(route="/v1/completions"))[-1]
    assert root.name == "text_completion smollm2"
    root = spans_of(record(route="", status=0))[-1]
    assert not any(name.startswith("http.") for name in root.attributes)


@pytest.mark.parametrize(
    ("fields", "error", "code"),
    [
        ({"outcome": "failed", "status": 500, "error": "server_error"}, "server_error", StatusCode.ERROR),
        ({"outcome": "failed", "status": 200, "error": ""}, "failed", StatusCode.ERROR),
        ({"outcome": "expired", "status": 504, "error": "deadline_exceeded"}, "deadline_exceeded", StatusCode.ERROR),
        ({"outcome": "refused", "status": 429, "error": "overloaded"}, "overloaded", StatusCode.UNSET),
        ({"outcome": "refused", "status": 400, "error": ""}, "400", StatusCode.UNSET),
        ({"outcome": "aborted", "status": 200, "error": ""}, "client_disconnected", StatusCode.UNSET),
    ],
)
def test_errors_have_their_type_and_the_servers_own_their_status(fields, error, code):
    root = spans_of(record(**fields))[-1]
    assert root.attributes["error.type"] == error
    assert root.status.status_code is code


def test_a_request_that_was_refused_at_the_door_has_a_span_of_what_it_passed():
    timeline = ((Mark.RECEIVED, BEGAN), (Mark.FAILED, BEGAN + MS), (Mark.WRITTEN, BEGAN + 2 * MS))
    found = spans_of(
        record(timeline=timeline, account={}, ended_ns=BEGAN + 2 * MS, ttft_ns=None, outcome="refused", status=400)
    )
    assert [one.name for one in found] == ["parse", "write", "chat smollm2"]


def test_the_callers_span_is_the_parent():
    *stages, root = spans_of(record(traceparent=SAMPLED, tracestate="vendor=value,other=1"))
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == PARENT
    assert root.parent.is_remote
    assert root.context.trace_state.to_header() == "vendor=value,other=1"
    assert {f"{one.context.trace_id:032x}" for one in stages} == {TRACE}


def test_a_caller_who_does_not_sample_gets_no_spans():
    assert spans_of(record(traceparent=UNSAMPLED)) == []


@pytest.mark.parametrize(
    "traceparent",
    [
        "nonsense", "00-0-0-01", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}", f"00-{TRACE.upper()}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01-more", "\xe9" * 55,
    ],
)  # fmt: skip
def test_a_malformed_parent_is_ignored(traceparent):
    root = spans_of(record(traceparent=traceparent, tracestate="a=b"))[-1]
    assert root.parent is None
    assert f"{root.context.trace_id:032x}" != TRACE


def test_samplers_decide_for_the_whole_request():
    assert spans_of(record(), ALWAYS_OFF) == []
    half = ParentBased(TraceIdRatioBased(0.5))
    kept = [len(spans_of(record(), half)) for _ in range(200)]
    assert set(kept) == {0, 14}
    assert 60 <= sum(map(bool, kept)) <= 140
    assert len(spans_of(record(traceparent=SAMPLED), ParentBased(ALWAYS_OFF))) == 14, "the caller's flag goes first"


def test_one_bad_request_does_not_end_exporting():
    with http_receiver() as got:
        exporting = Exporting(OtlpSettings("http", None, got.url, spans_every_s=0.05), LastError())
        exporting.start()
        exporting.take(Requests([record(account={"queue_reasons": 5}), record()]))
        exporting.end(10)
        assert got.spans
    assert exporting.report().spans_failed >= 1
    assert exporting.report().spans > 5


def test_settings_that_cannot_be_used_are_told(monkeypatch, tmp_path):
    monkeypatch.setattr(process_module, "span_exporter", lambda settings: 1 / 0)
    exporting = Exporting(OtlpSettings("http", None, "http://127.0.0.1:9", spans_every_s=0.05), LastError())
    exporting.start()
    exporting.take(Requests([record()]))
    exporting.end(10)
    assert exporting.report().spans_failed > 5
    assert "ZeroDivisionError" in exporting.report().last_error


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_why_an_export_failed_is_told(monkeypatch, protocol):
    """By the SDK's own words about each attempt: its last ones may say only that it gives up."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1" if protocol == "grpc" else "3")
    errors, sdk = LastError(), logging.getLogger("opentelemetry")
    sdk.addHandler(errors)
    try:
        exporting = Exporting(OtlpSettings(protocol, None, "http://127.0.0.1:9", spans_every_s=0.05), errors)
        exporting.start()
        exporting.take(Requests([record()]))
        exporting.end(10)
    finally:
        sdk.removeHandler(errors)
    assert "Connection refused" in exporting.report().last_error
    assert len(exporting.report().last_error) < 320


def test_a_cause_is_that_of_the_same_thread_and_export():
    errors = LastError()

    def say(level, text, *arguments):
        errors.emit(logging.LogRecord("opentelemetry", level, "", 0, text, arguments, None))

    say(logging.WARNING, "Transient error %s, retrying", OSError(111, "Connection refused"))
    assert errors.text == "Connection refused"
    say(logging.ERROR, "Failed due to timeout, max retries or shutdown.")
    assert errors.text == "Failed due to timeout, max retries or shutdown. The cause: Connection refused"
    errors.forget()
    assert errors.text == ""
    say(logging.ERROR, "Failed, code: %s, reason: %s", 404, "Not Found")
    assert errors.text == "Failed, code: 404, reason: Not Found"
    other = threading.Thread(target=say, args=(logging.ERROR, "of another thread"))
    other.start()
    other.join()
    assert errors.text == "Failed, code: 404, reason: Not Found"
