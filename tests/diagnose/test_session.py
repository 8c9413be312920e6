"""Whole sessions against servers with one fault: the sweeps, and the name of the fault."""

from __future__ import annotations

import statistics

import pytest

from firsttoken.core.tls import client_context
from firsttoken.diagnose.endpoint import Endpoint
from firsttoken.diagnose.errors import ProbeFailed
from firsttoken.diagnose.fit import fit
from firsttoken.diagnose.loop_lag import loop_lag, mean_between
from firsttoken.diagnose.probe import Probe
from firsttoken.diagnose.references import Reference
from firsttoken.diagnose.report import Targets, diagnosis
from firsttoken.diagnose.session import Runs, Session, SessionConfig
from tests.diagnose.double import Double

QUICK = SessionConfig(
    requests=6,
    pause_ms=1,
    prompt_tokens=40,
    max_tokens=8,
    sweep_prompts=(16, 200, 400),
    sweep_concurrency=(1, 2, 4),
    repeat=3,
    sweep_tokens=4,
)


def runs_of(double: Double, config: SessionConfig = QUICK, certificate=None) -> Runs:
    endpoint = Endpoint.parse(double.url)
    context = client_context(str(certificate.file)) if certificate is not None else None
    with double.running():
        endpoint = Endpoint.parse(double.url)
        return Session(Probe(endpoint, context, timeout_s=10), config).run()


def named(runs: Runs) -> tuple[str, str]:
    found = diagnosis(runs, Reference(), Targets())["bottleneck"]
    return found["layer"], found["cause"]


@pytest.mark.clock
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"tls_ms": 60}, ("network", "tls")),
        ({"tls_ms": 60, "keep_alive": False}, ("network", "no_reuse")),
        ({"think_ms": 60}, ("service", "batch_window")),
        ({"think_ms": 60, "serial": True}, ("service", "host")),
        ({"end_ms": 60}, ("network", "transfer")),
        ({"gaps_ms": [2, 2, 60, 2, 2, 2, 2]}, ("model", "jitter")),
        ({"think_ms": 40, "headers": ("X-Kong-Proxy-Latency: 40",)}, ("network", "load_balancer")),
    ],
)
def test_a_real_servers_fault_is_named(fault, expected, certificate) -> None:
    runs = runs_of(Double(gap_ms=2, context=certificate.context, **fault), certificate=certificate)
    assert named(runs) == expected


@pytest.mark.clock
def test_prompts_that_are_computed_again_are_named() -> None:
    """The double has no cache, and says nothing of one: it shows in the time alone."""
    runs = runs_of(Double(token_ms=0.5, gap_ms=2), SessionConfig(**{**vars_of(QUICK), "prompt_tokens": 200}))
    assert named(runs) == ("model", "cache_miss")


def vars_of(config: SessionConfig) -> dict:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


@pytest.mark.clock
def test_the_sweeps_find_the_slopes() -> None:
    runs = runs_of(Double(think_ms=10, token_ms=0.2, gap_ms=6))
    found = fit(runs.lengths, runs.crowds, 0.0)
    assert found.fixed_ms == pytest.approx(10, abs=3)
    assert found.prefill_ms_per_token == pytest.approx(0.2, rel=0.05)
    assert found.decode_ms_per_token == pytest.approx(6, rel=0.15)
    assert abs(found.queue_ms_per_caller) < 3


@pytest.mark.clock
def test_turns_are_seen_in_the_sweep_of_concurrency() -> None:
    runs = runs_of(Double(think_ms=20, serial=True))
    # Of c requests that think one after another the mean one waits (c - 1) / 2 turns.
    assert fit(runs.lengths, runs.crowds, 0.0).queue_ms_per_caller == pytest.approx(10, rel=0.3)
    assert {count: len(samples) for count, samples in runs.crowds.items()} == {1: 2, 2: 4, 4: 8}


def test_what_is_asked() -> None:
    double = Double()
    runs = runs_of(double)
    assert runs.model == "double"
    paced = [body["messages"][0]["content"].split() for body in double.bodies[:9]]
    assert len({tuple(words[:20]) for words in paced}) == 1, "half of a prompt is the same in all"
    assert len({tuple(words[20:]) for words in paced}) == len(paced), "the rest is not"
    assert runs.shared_tokens == 20
    assert all(body["stream"] and body["max_tokens"] in (4, 8) for body in double.bodies)
    assert runs.keep_alive.works
    assert runs.keep_alive.second.reused


@pytest.mark.parametrize(("mode", "extras"), [("refuse", {"stream_options"}), ("bare", set())])
def test_servers_that_refuse_extras_are_asked_in_plain(mode: str, extras: set[str]) -> None:
    double = Double(mode=mode)
    runs = runs_of(double)
    assert len(runs.paced) == QUICK.requests
    assert {"stream_options", "timings", "ignore_eos"} & double.bodies[-1].keys() == extras
    assert runs.paced[0].tokens == 8


def test_the_lag_of_the_servers_loop_is_the_mean_meanwhile() -> None:
    page = b"# HELP x y\nfirsttoken_event_loop_lag_seconds_sum %s\nfirsttoken_event_loop_lag_seconds_count %s\n"
    before, after = loop_lag(page % (b"1.5", b"100.0")), loop_lag(page % (b"1.6", b"120.0"))
    assert mean_between(before, after) == pytest.approx(5.0)
    assert mean_between(before, before) is None
    assert loop_lag(b"vllm:num_requests_running 1\n") is None
    assert mean_between(None, after) is None


def test_one_connection_for_all() -> None:
    runs = runs_of(Double(), SessionConfig(**{**vars_of(QUICK), "reuse": True}))
    assert [one.reused for one in runs.paced] == [False] + [True] * (QUICK.requests - 1)
    assert statistics.fmean(one.setup_ms for one in runs.paced[1:]) == 0


def test_one_connection_for_all_of_a_server_that_closes() -> None:
    runs = runs_of(Double(keep_alive=False), SessionConfig(**{**vars_of(QUICK), "reuse": True}))
    assert not any(one.reused for one in runs.paced)
    assert not runs.keep_alive.works
    assert runs.keep_alive.why == "the server ends the connection with its answer"


def test_a_page_instead_of_the_api() -> None:
    with pytest.raises(ProbeFailed, match="lists no model: is this the API's address"):
        runs_of(Double(mode="html"))


def test_what_fails_later_is_counted() -> None:
    double = Double()
    config = SessionConfig(**{**vars_of(QUICK), "sweep_prompts": (), "sweep_concurrency": ()})

    def fail_some(text: str) -> None:
        double.mode = "error" if text.startswith("request 3") else "stream"

    with double.running():
        runs = Session(Probe(Endpoint.parse(double.url), None, timeout_s=10), config, fail_some).run()
    result = diagnosis(runs, Reference(), Targets(e2e_p99=1e9))
    assert result["requests"]["failed"] == 1
    assert "out of cheese" in next(iter(result["requests"]["reasons"]))
    assert not result["targets"]["e2e_ms"]["met"], "no answer is no answer in time"


@pytest.mark.parametrize("status", [400, 404])
def test_a_model_without_a_chat_template_is_asked_to_go_on_with_a_text(status: int) -> None:
    double = Double(chat_refused=status)
    config = SessionConfig(
        requests=2, pause_ms=1, prompt_tokens=8, max_tokens=4, sweep_prompts=(), sweep_concurrency=()
    )
    runs = runs_of(double, config)
    assert [(one.tokens, one.prompt_tokens) for one in runs.paced] == [(4, 8)] * 2
    assert not runs.failures
    assert runs.notes[0].startswith("asked at /v1/completions, since chat is refused: ")
    assert set(double.paths[-2:]) <= {"/v1/completions", "/metrics"}


def test_a_length_that_the_server_refuses_is_left_out_with_a_note() -> None:
    double = Double()

    def refuse_long(text: str) -> None:
        double.mode = "error" if text.startswith("prompts of 400") else "stream"

    with double.running():
        runs = Session(Probe(Endpoint.parse(double.url), None, timeout_s=10), QUICK, refuse_long).run()
    assert sorted(runs.lengths) == [16, 200]
    assert "prompts of 400 tokens were left out" in runs.notes[0]
