"""A recording run again: the same requests, figures near those recorded, and what would have been."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from firsttoken.cli import main as cli
from firsttoken.core.clock import clock_replaced
from firsttoken.core.errors import ConfigError
from firsttoken.core.service import ServiceClass
from firsttoken.core.step_record import StepRecord
from firsttoken.core.step_sizes import StepSizes
from firsttoken.frontend.link import EngineLink
from firsttoken.observability.flight import FlightRecorder
from firsttoken.observability.flight_file import (
    Flight,
    FlightHead,
    FlightRequest,
    FlightSettings,
    write_flight,
)
from firsttoken.observability.step_history import StepHistory
from firsttoken.scheduler.step_time import StepLoad
from firsttoken.simulate.recorded_steps import ScatteredStepTime, TooFewSteps, fit_recorded
from firsttoken.simulate.replay import recorded_figures, recorded_load
from firsttoken.transport.messages import EngineInfo
from tests.support.scripted_engine import Engine, ask, count_up

MS = 1_000_000
COMMON = range(5000, 5128)


class Machine(Engine):
    """The real loop, scheduler and cache, on a device whose steps take what their tokens say, whatever else the machine
    does: a sleep."""

    def __init__(self) -> None:
        super().__init__(count_up, blocks=400, seqs=4, max_len=512, step_s=0.0)
        run = self.executor._run

        def slow(plan: Any) -> Any:
            began = time.monotonic_ns()
            time.sleep(0.006 + 0.00006 * plan.num_tokens)
            return msgspec.structs.replace(run(plan), started_ns=began, ended_ns=time.monotonic_ns())

        self.executor._run = slow


class Handle:
    """The engine as a front end is given one."""

    pid = None

    def __init__(self, engine: Engine) -> None:
        self.client = engine.client
        self.alive = engine.thread.is_alive


class Waiter:
    def __init__(self) -> None:
        self.ended = threading.Event()

    def deliver(self, delta: Any, ns: int) -> None:
        if delta.finish_reason is not None:
            self.ended.set()

    keep = deliver

    def wake(self) -> None:
        pass

    def refuse(self, refusal: Any) -> None:
        self.ended.set()

    def die(self, error: Any) -> None:
        self.ended.set()


INFO = EngineInfo(
    model="scripted",
    max_model_len=512,
    vocab_size=10_000,
    max_num_seqs=4,
    kv_blocks=400,
    block_tokens=16,
    bytes_per_block=1,
    device="cpu",
    dtype="float32",
    quantization="none",
    kv_dtype="float32",
)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seconds of requests at random, more than run at once, a part of them with a common beginning."""
    engine = Machine()
    link = EngineLink(Handle(engine))
    steps = StepHistory()
    flight = FlightRecorder(steps, tmp_path_factory.mktemp("flights"))
    flight.info = INFO
    flight.settings = FlightSettings(prefill_tokens=64, mixed_prefill_tokens=16)
    link.on_steps, link.flight = steps.add, flight
    link.listen()
    rng = random.Random(5)
    waiters = []
    for number in range(60):
        time.sleep(rng.expovariate(20))
        begin = list(COMMON) if rng.random() < 0.5 else []
        prompt = [*begin, *(number * 100 + i for i in range(rng.randint(5, 60)))]
        waiter = Waiter()
        service = int(ServiceClass.P0 if rng.random() < 0.3 else ServiceClass.P2)
        link.submit([ask(number, prompt, max_tokens=rng.choice([4, 12, 24]), service=service)], waiter)
        waiters.append(waiter)
    for waiter in waiters:
        assert waiter.ended.wait(30)
    path = flight.dump("a test").result(10)
    engine.stop()
    assert path is not None
    return path


def replayed(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert cli.main(["replay", *argv, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_figures_come_near_those_recorded(recording, capsys):
    result = replayed(capsys, str(recording))
    counts = {"recorded": 60, "replayed": 60, "left_out": {}, "cut_short": 0, "outcomes": {"finished": 60}}
    assert result["recording"]["requests"] == counts
    assert result["recording"]["missing"] is None
    assert result["step_times"]["source"] == "recording"
    recorded, [again] = result["recorded"], result["replayed"]
    assert set(again["classes"]) == set(recorded["classes"]) == {"p0", "p2"}
    for name, was in recorded["classes"].items():
        found = again["classes"][name]
        assert found["requests"] == was["requests"]
        for figure, off in (("ttft_ms", 0.5), ("itl_ms", 0.2), ("e2e_ms", 0.4)):
            assert found[figure]["p50"] == pytest.approx(was[figure]["p50"], rel=off), figure
            assert found[figure]["p99"] < 3 * was[figure]["p99"]
    assert again["hit_ratio"] == pytest.approx(recorded["hit_ratio"], abs=0.05)
    assert recorded["hit_ratio"] > 0.2
    assert again["steps"] == pytest.approx(recorded["steps"], rel=0.15)


def test_the_same_seed_gives_the_same_figures(recording, capsys):
    one, other = (replayed(capsys, str(recording), "--seed", "4")["replayed"][0] for _ in range(2))
    assert one["classes"] == other["classes"]


def test_what_would_have_been(recording, capsys):
    """Each change shows where it must: a faster load waits longer, one with less memory loses what it had cached."""
    plain = replayed(capsys, str(recording))["replayed"][0]
    fast = replayed(capsys, str(recording), "--scale", "3")["replayed"][0]
    assert fast["classes"]["p2"]["ttft_ms"]["mean"] > plain["classes"]["p2"]["ttft_ms"]["mean"]
    small = replayed(capsys, str(recording), "--kv-blocks", "24")["replayed"][0]
    assert small["evictions"] > plain["evictions"]
    narrow = replayed(capsys, str(recording), "--max-num-seqs", "1")["replayed"][0]
    assert narrow["classes"]["p2"]["ttft_ms"]["mean"] > plain["classes"]["p2"]["ttft_ms"]["mean"]
    result = replayed(capsys, str(recording), "--policy", "default,prefill-first")
    assert [one["policy"] for one in result["replayed"]] == ["default", "prefill-first"]
    assert result["replayed"][0]["classes"] == plain["classes"]
    assert result["replayed"][1]["classes"] != plain["classes"]


def test_people_get_recorded_beside_replayed(recording, capsys):
    assert cli.main(["replay", str(recording), "--scale", "1.5"]) == 0
    out = capsys.readouterr().out
    for text in (
        "60 requests: 60 finished\n60 run again\n",
        "run with 400 KV blocks, 4 requests at once, admission on, 1.5 times as fast\n",
        "\nrecorded p0 ",
        "\nreplayed, default p2 ",
        "a test",
    ):
        assert text in out


# ---------------------------------------------------------------- what is taken, and what is not


def request(number: int, **fields: Any) -> FlightRequest:
    given = {"at_ns": 10**15 + number * MS, "prompt_tokens": 10, "max_tokens": 9, "outcome": "finished"}
    return FlightRequest(**{"id": number, "output_tokens": 3, "first_ns": MS, "gaps_us": [5, 5], **given, **fields})


def flight(*requests: FlightRequest, source: Any = "front end", **settings: Any) -> Flight:
    head = FlightHead.now("a test", 128, INFO, FlightSettings(**settings), source)
    return Flight(head, list(requests))


def test_requests_become_jobs_by_how_they_ended():
    load = recorded_load(
        flight(
            request(0, prompt_tokens=300, pieces=[0, 1, 2], service=0, tenant=2, priority=-1, deadline_ms=80.0),
            request(1, outcome="aborted", ended_ns=7 * MS),
            request(2, outcome="running"),
            request(3, outcome="failed", output_tokens=2),
            request(4, outcome="failed", output_tokens=0),
            request(5, outcome="refused", output_tokens=0),
            request(6, outcome="expired", output_tokens=0),
            request(7, outcome="running", output_tokens=0),
        )
    )
    first, left, running, failed = load.jobs
    assert (first.at_ns, first.input, first.output, first.blocks, first.block_tokens) == (0, 300, 3, (0, 1, 2), 128)
    assert (first.service, first.tenant, first.priority, first.deadline_ms) == (0, "2", -1, 80.0)
    assert len(first.prompt(0)) == 4 * 300
    assert (left.at_ns, left.output, left.patience_ms) == (MS, 9, 7.0)
    assert (running.output, running.counted_in) == (3, "p2 cut short")
    assert failed.output == 2
    assert load.left_out == {"failed": 1, "refused": 1, "expired": 1, "running": 1}


def test_a_prompt_alone_is_computed_again_as_such():
    alone = {"max_tokens": 0, "output_tokens": 0, "first_ns": 0, "gaps_us": [], "ended_ns": 4 * MS}
    recorded = [request(0, prompt_tokens=300, **alone), request(1, **alone)]
    load = recorded_load(flight(*recorded))
    assert [(job.input, job.output) for job in load.jobs] == [(300, 0), (10, 0)]
    assert recorded_figures(recorded)["p2"]["ttft_ms"]["max"] == 4.0


def test_every_request_is_counted_once_and_in_words(tmp_path, capsys):
    given = flight(
        *(request(number) for number in range(8)),
        request(8, outcome="failed", output_tokens=2, ended_ns=MS),
        request(9, outcome="failed", output_tokens=0),
        request(10, outcome="aborted", ended_ns=1),
        request(11, outcome="refused", output_tokens=0),
        request(12, outcome="expired", output_tokens=0),
    )
    path = write_flight(tmp_path, given.head, requests=given.requests, steps=[made_steps(400, prompts=40)])
    assert cli.main(["replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert (
        "13 requests: 1 aborted, 1 expired, 2 failed, 8 finished, 1 refused\n10 run again, 1 of them cut short" in out
    )
    assert "left out, since no token came: 1 expired, 1 failed, 1 refused" in out
    rows = [line for line in out.splitlines() if line.startswith("replayed, default p2")]
    assert sum(int(line.removeprefix("replayed, default p2").replace("cut short", "").split()[0]) for line in rows) == 9
    assert "; not in the rows: 1 left" in out


def test_callers_who_wait_come_after_their_last_answer():
    """Two callers of a tenant, one of another, who asks while his first answer runs."""
    load = recorded_load(
        flight(
            request(0, ended_ns=100 * MS),
            request(20, ended_ns=100 * MS),
            request(50, tenant=1, ended_ns=100 * MS),
            request(60, tenant=1, ended_ns=10 * MS),
            request(105, ended_ns=100 * MS),  # 5 ms after the first
            request(130, ended_ns=100 * MS),  # 10 ms after the second
            request(300, tenant=1, outcome="running"),  # 150 ms after his latest end, of the one of 50
        ),
        closed=True,
    )
    assert [(job.after, job.at_ns // MS) for job in load.jobs] == [
        (None, 0),
        (None, 20),
        (None, 50),
        (None, 60),
        (0, 5),
        (1, 10),
        (2, 150),
    ]


def test_a_replay_far_off_its_recording_says_so_and_a_closed_one_piles_nothing_up(tmp_path, capsys):
    """Four callers at a time, whose answers took 3 ms; the recording's steps take some times as long."""
    asked = [
        request(4 * (number // 4), id=number, ended_ns=3 * MS, first_ns=MS // 2, gaps_us=[1000, 1000])
        for number in range(200)
    ]
    given, steps = flight(*asked), made_steps(400, prompts=40)
    path = write_flight(tmp_path, given.head, requests=given.requests, steps=[steps])
    opened, closed = replayed(capsys, str(path)), replayed(capsys, str(path), "--closed")
    assert (opened["closed"], closed["closed"]) == (False, True)
    assert (
        opened["replayed"][0]["classes"]["p2"]["requests"] == closed["replayed"][0]["classes"]["p2"]["requests"] == 200
    )
    assert (
        closed["replayed"][0]["classes"]["p2"]["ttft_ms"]["p99"]
        < opened["replayed"][0]["classes"]["p2"]["ttft_ms"]["p50"]
    )
    assert "replayed as it was recorded, p2's TTFT p50 is " in opened["warnings"][0]
    assert "--closed" in opened["warnings"][0]
    assert replayed(capsys, str(path), "--scale", "2")["warnings"] == []


def test_a_recording_that_was_cut_is_run_as_far_as_it_is_whole(recording, tmp_path, capsys):
    whole = recording.read_bytes()
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(whole[: len(whole) - 200])
    result = replayed(capsys, str(cut))
    assert result["recording"]["requests"]["replayed"] == 60
    assert "lines and no end: only what is whole of it is run again" in result["warnings"][0]
    cut.write_bytes(whole[: whole.index(b'"requests"')])
    assert cli.main(["replay", str(cut)]) == 2
    assert "no request is in what is left of it" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["none.jsonl", ""])
def test_a_file_that_cannot_be_read_is_bad_usage(tmp_path, capsys, name):
    assert cli.main(["replay", str(tmp_path / name)]) == 2
    assert f"cannot read {tmp_path / name}: " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "x", "nan", "inf"])
def test_a_scale_is_a_number_above_0(capsys, text):
    with pytest.raises(SystemExit):
        cli.main(["replay", "x", f"--scale={text}"])
    assert f"argument --scale: '{text}' is not a number above 0" in capsys.readouterr().err


def test_without_prefix_caching_nothing_is_found_again():
    load = recorded_load(flight(request(0, pieces=[0]), prefix_caching=False))
    assert load.jobs[0].blocks == ()


@pytest.mark.parametrize(
    ("recorded", "complaint"),
    [
        (flight(), "none came"),
        (flight(request(0, outcome="refused", output_tokens=0)), "1 refused"),
        (flight(source="engine"), "is the engine's own"),
    ],
)
def test_a_recording_without_requests_is_refused(recorded, complaint):
    with pytest.raises(ConfigError, match=complaint):
        recorded_load(recorded)


def test_recorded_figures_are_of_those_that_finished():
    found = recorded_figures(
        [request(0), request(1, first_ns=3 * MS), request(2, outcome="aborted"), request(3, service=0, gaps_us=[])]
    )
    assert {name: one["requests"] for name, one in found.items()} == {"p0": 1, "p2": 2}
    assert found["p2"]["ttft_ms"]["mean"] == 2.0
    assert found["p2"]["itl_ms"]["max"] == 0.005
    assert found["p2"]["e2e_ms"]["max"] == pytest.approx(3.01)
    assert found["p0"]["itl_ms"] == {}


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"format": "firsttoken-flight", "version": 0}'])
def test_a_file_that_is_no_recording_is_bad_usage(tmp_path, capsys, text):
    file = tmp_path / "x.jsonl"
    file.write_text(text)
    assert cli.main(["replay", str(file)]) == 2
    assert f"replay: error: {file} " in capsys.readouterr().err


# ---------------------------------------------------------------- step times


def made_steps(count: int, *, prompts: int, slow: range = range(0)) -> list[StepRecord]:
    """Steps of 2 ms and 0.01 ms a token, of which ``prompts`` have 100 tokens of a prompt; ``slow`` take twice that."""
    steps, at = [], 10**15
    for number in range(count):
        tokens = 100 if number % (count // prompts) == 0 and number // (count // prompts) < prompts else 0
        ms = (2 + 0.01 * (4 + tokens)) * (2 if number in slow else 1)
        end = at + round(ms * MS)
        steps.append(StepRecord(number, at, at, at, end, end, 4, tokens, prefill_pairs=5050 if tokens else 0))
        at = end
    return steps


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_model_is_that_of_the_steps(in_flight):
    found = fit_recorded(made_steps(400, prompts=40), StepSizes(), in_flight)
    assert found.model.ms(StepLoad(4, 0, 0, 0)) == pytest.approx(2.04, rel=0.01)
    assert found.model.ms(StepLoad(4, 0, 100, 5050)) == pytest.approx(3.04, rel=0.01)
    assert found.error["decode"]["p90"] < 0.01
    assert set(found.error) == {"decode", "mixed"}


def test_a_slow_minute_is_slow_again_at_its_time():
    steps = made_steps(400, prompts=40, slow=range(200, 300))
    found = fit_recorded(steps, StepSizes(), 1)
    times = ScatteredStepTime(found, steps[0].started_ns)
    took = []
    for step in steps:
        with clock_replaced(lambda at=step.started_ns - steps[0].started_ns: at):
            took.append(times.ms(StepLoad(4, 0, 0, 0)))
    assert sum(took[220:280]) / 60 == pytest.approx(4.08, rel=0.05)
    assert sum(took[20:180]) / 160 == pytest.approx(2.04, rel=0.05)


def test_too_few_steps_are_told_by_their_sort():
    with pytest.raises(TooFewSteps, match="has 0 steps that only decode"):
        fit_recorded([], StepSizes(), 1)
    with pytest.raises(TooFewSteps, match="has 3 steps with prompts, and a model of step times takes 16"):
        fit_recorded(made_steps(400, prompts=3), StepSizes(), 1)


def test_shipped_step_times_are_taken_where_the_recordings_do_not_suffice(tmp_path, capsys):
    given = flight(*(request(number) for number in range(5)))
    path = write_flight(tmp_path, given.head, requests=given.requests, steps=[made_steps(40, prompts=4)])
    result = replayed(capsys, str(path))
    assert result["step_times"]["source"] == "h200 llama-3.1-8b"
    assert "has 4 steps with prompts" in result["step_times"]["why"]
    assert result["replayed"][0]["classes"]["p2"]["requests"] == 5
    assert cli.main(["replay", str(path)]) == 0
    assert "warning: the recording has 4 steps with prompts" in capsys.readouterr().out
