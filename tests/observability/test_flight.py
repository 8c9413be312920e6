"""The flight recorder: what it keeps of requests, what it gives away, what it writes, and what is read of that."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from array import array
from pathlib import Path

import msgspec
import pytest

from firsttoken.core.clock import NS_PER_S, clock_replaced
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError
from firsttoken.core.request import EngineRequest
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import ClassTargets, KeyRule, Targets
from firsttoken.core.step_record import StepRecord
from firsttoken.core.timeline import Mark
from firsttoken.observability import flight as flight_module
from firsttoken.observability import flight_file
from firsttoken.observability.flight import HASH_AT_BYTES, PIECE_TOKENS, REQUEST_BYTES, FlightRecorder
from firsttoken.observability.flight_file import KEPT_FILES, Flight, read_flight
from firsttoken.observability.step_history import StepHistory
from firsttoken.transport.messages import EngineStats, RequestDelta, StepOutputs

MS = 1_000_000


class Clock:
    now = 10**15

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock():
    clock = Clock()
    with clock_replaced(clock):
        yield clock


def recorder(folder: Path | None) -> FlightRecorder:
    return FlightRecorder(StepHistory(), folder)


def ask(number: int, tokens: list[int], **fields: object) -> EngineRequest:
    prompt = array("I", tokens).tobytes()
    return EngineRequest(id=number, prompt=prompt, params=SamplingParams(), seed=0, max_tokens=50, **fields)


def tell(flight: FlightRecorder, clock: Clock, *deltas: RequestDelta) -> None:
    flight.told(StepOutputs(list(deltas), EngineStats(heartbeat_ns=clock.now)), clock.now)


def written(flight: FlightRecorder) -> Flight:
    path = flight.dump("a test").result(10)
    assert path is not None
    return read_flight(path)


def test_a_request_is_kept_with_its_times(tmp_path, clock):
    flight = recorder(tmp_path)
    began = clock.now
    flight.submitted([ask(1, [5] * 300, service=0, priority=-3, deadline_ns=began + 80 * MS)])
    clock.now += 20 * MS
    stamps = [(int(Mark.ARRIVED), began + MS), (int(Mark.SCHEDULED), began + 4 * MS)]
    tell(flight, clock, RequestDelta(1, [7], cached_tokens=256, stamps=stamps))
    for gap in (5, 9):
        clock.now += gap * MS
        tell(flight, clock, RequestDelta(1, [7]))
    clock.now += 6 * MS
    tell(flight, clock, RequestDelta(1, [7], finish_reason="stop", cached_tokens=256, preemptions=2))
    [request] = written(flight).requests
    assert (request.at_ns, request.first_ns, request.started_ns, request.ended_ns) == (
        began,
        20 * MS,
        4 * MS,
        40 * MS,
    )
    assert request.gaps_us == [5000, 9000, 6000]
    assert (request.prompt_tokens, request.output_tokens, request.cached_tokens) == (300, 4, 256)
    assert (request.service, request.priority, request.deadline_ms, request.preemptions) == (0, -3, 80.0, 2)
    assert (request.outcome, len(request.pieces)) == ("finished", 3)


def test_a_prompt_alone_is_kept(tmp_path, clock):
    flight = recorder(tmp_path)
    flight.submitted([msgspec.structs.replace(ask(1, [5] * 20), max_tokens=0, pooling="mean")])
    clock.now += MS
    tell(flight, clock, RequestDelta(1, [], finish_reason="stop", pooled=b"1234"))
    [request] = written(flight).requests
    assert (request.outcome, request.prompt_tokens, request.max_tokens, request.output_tokens) == ("finished", 20, 0, 0)


def test_how_a_request_ends_is_told_apart(tmp_path, clock):
    flight = recorder(tmp_path)
    flight.submitted([ask(number, [number]) for number in range(1, 8)])
    tell(flight, clock, *(RequestDelta(number, [1]) for number in range(1, 8)))
    clock.now += MS
    tell(
        flight,
        clock,
        RequestDelta(1, [1], finish_reason="length"),
        RequestDelta(2, [], finish_reason="error", error="not finite"),
        RequestDelta(3, [], finish_reason="error", error="too late", code="deadline_exceeded"),
    )
    flight.left([4], finished=True)
    flight.left([5, 99], finished=False)
    flight.refused(6)
    outcomes = [request.outcome for request in written(flight).requests]
    assert sorted(outcomes) == ["aborted", "expired", "failed", "finished", "finished", "refused", "running"]
    assert {request.id: request.outcome for request in written(flight).requests}[4] == "finished"


def test_pieces_say_which_prompts_begin_alike_and_nothing_else(tmp_path, clock):
    flight, other = recorder(tmp_path), recorder(tmp_path)
    common = list(range(1, 2 * PIECE_TOKENS + 1))
    prompts = [[*common, 7, 7], [*common, 8], [9, *common[1:]], common]
    flight.submitted([ask(number, prompt, salt="x") for number, prompt in enumerate(prompts)])
    flight.submitted([ask(10, prompts[0], salt="y"), ask(11, prompts[0], salt="x")])
    found = {request.id: request.pieces for request in written(flight).requests}
    a, b = found[0][:2]
    assert found[1][:2] == [a, b]
    assert found[3] == [a, b]
    assert found[0][2] != found[1][2]
    assert not set(found[2]) & set(found[0])
    assert not set(found[10]) & set(found[0])
    assert found[11] == found[0]
    assert max(max(pieces) for pieces in found.values()) < sum(len(pieces) for pieces in found.values())
    other.submitted([ask(0, prompts[0], salt="x")])
    keyed = [next(iter(one._live.values())) for one in (flight, other)]
    other.dump("a test").result(10)
    assert keyed[0].pieces.tolist() != keyed[1].pieces.tolist(), "the key is not the process's own"


def test_no_word_of_prompts_keys_or_callers_is_in_the_file(tmp_path, clock):
    flight = recorder(tmp_path)
    targets = Targets(p0=ClassTargets(ttft_p99=80.0), keys={"keyname": KeyRule(share=2.0)})
    flight.write_for(EngineArgs(flight_dir=str(tmp_path), targets=targets, in_flight=3))
    flight.submitted([ask(1, [123456, 654321] * 100, salt="my salt", tenant="keyname"), ask(2, [1], tenant="other")])
    tell(flight, clock, RequestDelta(1, [777777], finish_reason="length"))
    path = flight.dump("a test").result(10)
    text = path.read_text()
    for word in ("123456", "654321", "777777", "my salt", "keyname", "other", flight._key.hex()):
        assert word not in text
    assert path.stat().st_mode & 0o077 == 0
    found = read_flight(path)
    assert [request.tenant for request in found.requests] == [1, 2]
    assert found.head.settings.targets.p0.ttft_p99 == 80.0
    assert found.head.settings.in_flight == 3


def test_steps_stats_and_events_are_in_it(tmp_path, clock):
    flight = recorder(tmp_path)
    steps = [
        StepRecord(number, number, number, number, number, clock.now, prefill_requests=(number,))
        for number in range(999)
    ]
    flight.steps.add(steps)
    for _ in range(30):
        clock.now += NS_PER_S // 10
        tell(flight, clock)
    flight.event("draining", "3 requests run")
    found = written(flight)
    assert found.steps == steps
    assert len(found.stats) == 3
    assert [(event.kind, event.text) for event in found.events] == [("draining", "3 requests run")]
    assert found.head.reason == "a test"


def test_what_is_old_or_too_much_is_forgotten(tmp_path, clock, monkeypatch):
    flight = recorder(tmp_path)
    for number in range(10):
        flight.submitted([ask(number, [1])])
        clock.now += 60 * NS_PER_S
        tell(flight, clock, RequestDelta(number, [1], finish_reason="length"))
    assert [request.id for request in written(flight).requests] == [4, 5, 6, 7, 8, 9]
    monkeypatch.setattr(flight_module, "MAX_REQUEST_BYTES", 20_000)
    for number in range(10, 200):
        flight.submitted([ask(number, [1])])
        tell(flight, clock, RequestDelta(number, [1], finish_reason="length"))
    assert 10_000 < flight.request_bytes <= 20_000
    assert [request.id for request in written(flight).requests] == list(range(200 - flight.num_requests, 200))


def test_prompts_are_hashed_before_they_take_much_memory(clock, monkeypatch):
    monkeypatch.setattr(flight_module, "HASH_AT_BYTES", 5000)
    flight = recorder(None)
    flight.submitted([ask(1, [1] * 900)])
    assert len(flight._unhashed) == 1
    flight.submitted([ask(2, [1] * 900)])
    assert flight._unhashed == []
    flight.close()
    assert [len(flying.pieces) for flying in flight._live.values()] == [8, 8]


def test_requests_are_not_held_by_short_prompts_that_wait_to_be_hashed(clock):
    flight = recorder(None)
    most = 0
    for number in range(10_000):
        flight.submitted([ask(number, [1])])
        flight.refused(number)
        clock.now += NS_PER_S
        most = max(most, len(flight._unhashed))
    assert most * REQUEST_BYTES <= HASH_AT_BYTES
    flight.close()


def test_a_death_is_written_and_all_that_ran_failed_with_it(tmp_path, clock):
    flight = recorder(tmp_path)
    flight.submitted([ask(1, [1])])
    tell(flight, clock, RequestDelta(1, [1]))
    flight.died("RuntimeError: the device is gone")
    flight.close()
    [path] = tmp_path.iterdir()
    found = read_flight(path)
    assert found.head.reason == "engine died: RuntimeError: the device is gone"
    assert [request.outcome for request in found.requests] == ["failed"]
    assert [event.kind for event in found.events] == ["engine died"]


def test_one_that_came_past_its_deadline_expired(tmp_path, clock):
    flight = recorder(tmp_path)
    flight.submitted([ask(1, [1]), ask(2, [2])])
    flight.refused(1, "deadline_exceeded")
    flight.refused(2, "overloaded")
    assert [one.outcome for one in read_flight(flight.dump("a test").result(10)).requests] == ["expired", "refused"]


def test_without_a_folder_nothing_is_written(caplog):
    assert recorder(None).dump("SIGUSR1").result(1) is None
    assert "give --flight-dir" in caplog.text


def test_a_folder_that_cannot_be_written_is_told(tmp_path, caplog):
    file = tmp_path / "file"
    file.write_text("x")
    assert recorder(file / "below").dump("SIGUSR1").result(10) is None
    assert "nothing could be written to" in caplog.text


def test_old_files_go_and_others_stay(tmp_path, clock):
    (tmp_path / "notes.txt").write_text("mine")
    flight = recorder(tmp_path)
    paths = []
    for _ in range(KEPT_FILES + 3):
        paths.append(flight.dump("a test").result(10))
        threading.Event().wait(0.002)  # the name has milliseconds
    left = sorted(tmp_path.glob("flight-*"))
    assert left == paths[3:]
    assert (tmp_path / "notes.txt").exists()


def test_a_calendar_that_was_set_back_costs_no_recording(tmp_path, clock, monkeypatch):
    flight = recorder(tmp_path)
    for _ in range(KEPT_FILES):
        flight.dump("a test").result(10)
        threading.Event().wait(0.002)
    was = time.time_ns()
    monkeypatch.setattr(flight_file.time, "time_ns", lambda: was - 3600 * NS_PER_S)
    path = flight.dump("an hour before").result(10)
    assert read_flight(path).head.reason == "an hour before"
    assert len(list(tmp_path.glob("flight-*"))) == KEPT_FILES


def test_what_a_killed_writer_left_goes(tmp_path, clock):
    for name, age_s in (("flight-old.part", 2 * flight_file.ABANDONED_S), ("flight-new.part", 0)):
        (tmp_path / name).write_text("{")
        os.utime(tmp_path / name, times=(time.time() - age_s,) * 2)
    path = recorder(tmp_path).dump("a test").result(10)
    assert sorted(tmp_path.iterdir()) == sorted([path, tmp_path / "flight-new.part"])


@pytest.fixture
def held(monkeypatch):
    """Files are not written until it is set."""
    held = threading.Event()

    def write(*args, **kwargs):
        held.wait(10)
        return flight_file.write_flight(*args, **kwargs)

    monkeypatch.setattr(flight_module, "write_flight", write)
    yield held
    held.set()


def test_a_storm_of_signals_writes_two_files_and_a_death_its_own(tmp_path, clock, held):
    flight = recorder(tmp_path)
    dumps = [flight.dump("SIGUSR1")]
    while flight._latest:  # until the first is begun
        time.sleep(0.001)
    for number in range(100):
        flight.submitted([ask(number, [7])])
        dumps.append(flight.dump("SIGUSR1"))
        threading.Event().wait(0.0001)
    flight.died("a test")
    held.set()
    flight.close()
    paths = [path for dump in dumps if (path := dump.result(0)) is not None]
    assert [len(read_flight(path).requests) for path in paths] == [0, 100]
    reasons = sorted(read_flight(path).head.reason for path in tmp_path.glob("*.jsonl"))
    assert reasons == ["SIGUSR1", "SIGUSR1", "engine died: a test"]


def test_prompts_do_not_pile_up_behind_a_disk_that_hangs(tmp_path, clock, held, monkeypatch):
    monkeypatch.setattr(flight_module, "HASH_AT_BYTES", 4000)
    monkeypatch.setattr(flight_module, "MAX_HASHING_BYTES", 20_000 + 4 * REQUEST_BYTES)
    flight = recorder(tmp_path)
    flight.dump("a test")
    for number in range(50):
        flight.submitted([ask(number, [1] * 1001)])
    assert flight._hashing_bytes == 4 * (4004 + REQUEST_BYTES)
    held.set()
    assert [len(one.pieces) for one in written(flight).requests] == [8] * 4 + [0] * 46
    flight.submitted([ask(50, [1] * 1001)])
    assert len(written(flight).requests[-1].pieces) == 8


def test_nothing_is_written_once_the_server_ends(tmp_path, clock, caplog):
    flight = recorder(tmp_path)
    flight.submitted([ask(1, [1])])
    flight.close()
    assert flight.dump("SIGUSR1").result(0) is None
    assert "SIGUSR1, but the server ends" in caplog.text


def test_long_collections_are_noted(monkeypatch, tmp_path):
    monkeypatch.setattr(flight_module, "FREEZE_NS", 0)
    flight = recorder(tmp_path)
    stop = flight.watch_collector()
    gc.collect()
    stop()
    gc.collect()
    kinds = [event.text for event in flight._events if event.kind == "gc"]
    assert any(text.startswith("generation 2 took") for text in kinds)
    assert flight._on_gc not in gc.callbacks


# ---------------------------------------------------------------- files that are none


@pytest.fixture
def good(tmp_path, clock) -> Path:
    flight = recorder(tmp_path)
    flight.submitted([ask(1, [1])])
    flight.steps.add([StepRecord(1, 1, 2, 3, 4, 5)])
    path = flight.dump("a test").result(10)
    assert path is not None
    return path


def changed(path: Path, change) -> Path:
    lines = path.read_text().splitlines()
    path.write_text("\n".join(change(lines)) + "\n")
    return path


def with_head(**fields):
    return lambda lines: [json.dumps(json.loads(lines[0]) | fields), *lines[1:]]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (with_head(version=0), "has version 0 of the format"),
        (with_head(version=2), "has version 2 .* use the firsttoken that wrote it"),
        (with_head(format="else"), "is no recording"),
        (with_head(piece_tokens=0), "line 1: the file is damaged"),
        (lambda lines: ["{}", *lines[1:]], "is no recording"),
        (lambda lines: ["\x00\xff", *lines[1:]], "is no recording"),
        (lambda lines: lines[:-1], "is cut short"),
        (lambda lines: [*lines[:2], lines[2][:20]], "line 3: the file is damaged or cut short"),
        (lambda lines: [*lines[:2], *lines[3:]], "should have 1 requests and 1 steps, and has 0 and 1"),
        (lambda lines: [*lines, lines[1]], "line 6: something follows the end"),
        (lambda lines: [lines[0], '{"other": 1}', *lines[1:]], "line 2: .*other"),
        (
            lambda lines: [line.replace('"prompt_tokens":1', '"prompt_tokens":-1') for line in lines],
            "line 3: .*damaged",
        ),
    ],
)
def test_what_is_no_recording_is_refused_with_the_reason(good, change, complaint):
    assert len(read_flight(good).requests) == 1
    with pytest.raises(ConfigError, match=complaint):
        read_flight(changed(good, change))


INFO = {
    "model": "m",
    "max_model_len": 512,
    "vocab_size": 9,
    "max_num_seqs": 4,
    "kv_blocks": 400,
    "block_tokens": 16,
    "bytes_per_block": 1,
    "device": "cpu",
    "dtype": "float32",
    "quantization": "none",
    "kv_dtype": "float32",
}


@pytest.mark.parametrize(
    "change",
    [
        with_head(written_unix_ns=10**30),
        *(with_head(info=INFO | {"kv_blocks": blocks}) for blocks in (-1, 0, 10**12, 10**30)),
        with_head(info=INFO | {"max_num_seqs": 10**12}),
        with_head(info=INFO | {"max_model_len": 10**12}),
        with_head(settings={"in_flight": 0}),
        with_head(settings={"prefill_tokens": 1 << 63}),
        with_head(settings={"targets": {"p1": {"starts_within": 1e308}}}),
        lambda lines: [lines[0][:-1] + ',"x":' + "[" * 10**5 + "]" * 10**5 + "}", *lines[1:]],
        lambda lines: [line.replace('"at_ns":', '"at_ns":-') for line in lines],
        lambda lines: [line.replace('"at_ns":', '"at_ns":99999999999999') for line in lines],
        lambda lines: [line.replace('"prompt_tokens":', '"first_ns":-1,"prompt_tokens":') for line in lines],
        lambda lines: [line.replace('"pieces":[0', '"pieces":[1000000000000') for line in lines],
        lambda lines: [line.replace('"prompt_tokens":', '"output_tokens":4000000,"prompt_tokens":') for line in lines],
    ],
)
def test_numbers_that_no_recorder_writes_are_refused(good, change):
    before = good.read_text()
    changed(good, change)
    assert good.read_text() != before
    with pytest.raises(ConfigError, match=r"(damaged|no recording)"):
        read_flight(good)


def test_more_than_a_recorder_keeps_is_refused_before_it_fills_the_memory(good, monkeypatch):
    lines = good.read_text().splitlines()
    monkeypatch.setattr(flight_file, "MAX_REQUESTS", 5)
    with pytest.raises(ConfigError, match=r"line 8: more than 5 requests"):
        read_flight(changed(good, lambda _: [lines[0], lines[1], *[lines[2]] * 10**5, lines[-1]]))


def test_a_file_cut_anywhere_is_refused(good):
    whole = good.read_bytes()
    for cut in range(len(whole) - 1):  # without the last line break it is whole
        good.write_bytes(whole[:cut])
        with pytest.raises(ConfigError):
            read_flight(good)


def test_an_empty_file_and_none_are_refused(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("")
    with pytest.raises(ConfigError, match="is no recording"):
        read_flight(empty)
    with pytest.raises(OSError, match="none"):
        read_flight(tmp_path / "none")


def test_its_steps_are_in_the_order_that_the_head_names(good):
    lines = [json.loads(line) for line in good.read_text().splitlines()]
    assert tuple(lines[0]["step_fields"]) == StepRecord.__struct_fields__
    [row] = [line["steps"][0] for line in lines if "steps" in line]
    assert msgspec.convert(row, StepRecord) == StepRecord(1, 1, 2, 3, 4, 5)
