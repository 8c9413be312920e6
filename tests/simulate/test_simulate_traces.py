from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firsttoken.bench.arrivals import Mix, poisson
from firsttoken.core.errors import ConfigError
from firsttoken.core.service import ServiceClass
from firsttoken.simulate import traces
from firsttoken.simulate.traces import AZURE_HEADER, read_trace
from firsttoken.simulate.workload import Job, poisson_jobs, speeded_up, within


def mooncake(timestamp: float = 0, tokens: Any = 600, output: Any = 5, hash_ids: Any = (1, 2)) -> str:
    return json.dumps(
        {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": list(hash_ids)}
    )


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_mooncake(tmp_path: Path) -> None:
    trace = write(tmp_path / "trace", mooncake(1000), mooncake(1003.5, 512, 7, [9]), "")
    assert read_trace(trace) == [Job(0, 600, 5, (1, 2)), Job(3_500_000, 512, 7, (9,))]


def test_azure(tmp_path: Path) -> None:
    trace = write(
        tmp_path / "trace",
        AZURE_HEADER + "\r",
        "2023-11-16 18:15:46.6805900,374,44\r",
        "2023-11-16 18:15:50.9951690,396,109\r",
    )
    assert read_trace(trace) == [Job(0, 374, 44), Job(4_314_579_000, 396, 109)]


def test_azure_with_zones_and_out_of_order(tmp_path: Path) -> None:
    trace = write(tmp_path / "trace", AZURE_HEADER, "2024-05-12 00:00:01.5+00:00,3,4", "2024-05-12 00:00:01+00:00,1,2")
    assert read_trace(trace) == [Job(0, 1, 2), Job(500_000_000, 3, 4)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"timestamp": 0, "input_length": 6', "truncated"),
        ("[1]", "array"),
        (mooncake(tokens=0, hash_ids=[]), ">= 1 - at `$.input_length`"),
        (mooncake(tokens="600"), "at `$.input_length`"),
        (mooncake(tokens=1 << 40), "at `$.input_length`"),
        (mooncake(output=0), "at `$.output_length`"),
        (mooncake(timestamp=-1), "at `$.timestamp`"),
        (mooncake(hash_ids=[1]), "600 tokens are 2 blocks of 512, but there are 1 hash_ids"),
        (mooncake(hash_ids=[1, 1 << 32]), "at `$.hash_ids[1]`"),
        (mooncake(hash_ids=[1, -1]), "at `$.hash_ids[1]`"),
        ('{"timestamp": 0}', "missing required field"),
    ],
)
def test_a_damaged_line_is_refused_with_its_number(tmp_path: Path, line: str, reason: str) -> None:
    trace = write(tmp_path / "trace.jsonl", mooncake(), "", line, mooncake())
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 3: ") as refused:
        read_trace(trace)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("2023-11-16 18:15:46.68,374", "2 cells instead of 3"),
        ("yesterday,374,44", "'yesterday' is not a time"),
        ("2023-11-16 18:15:46+00:00,374,44", "is not a time like the others"),
        ("2023-11-16 18:15:46,x,44", "ContextTokens is 'x'"),
        ("2023-11-16 18:15:46,-3,44", "ContextTokens is '-3'"),
        ("2023-11-16 18:15:46,²,44", "ContextTokens is '²'"),
        ("2023-11-16 18:15:46,7,0", "GeneratedTokens is '0'"),
        ("2023-11-16 18:15:46,7," + "9" * 5000, "GeneratedTokens is '999"),
    ],
)
def test_a_damaged_csv_line_is_refused_with_its_number(tmp_path: Path, line: str, reason: str) -> None:
    trace = write(tmp_path / "trace.csv", AZURE_HEADER, "2023-11-16 18:15:46.68,374,44", line)
    with pytest.raises(ConfigError, match=r"trace\.csv, line 3: ") as refused:
        read_trace(trace)
    assert reason in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("lines", [("TIMESTAMP,Tokens", "1,2"), ("",), ("hello",), (AZURE_HEADER,)])
def test_what_is_no_trace_is_refused(tmp_path: Path, lines: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"is no trace that is known|has no requests"):
        read_trace(write(tmp_path / "trace", *lines))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_bytes(mooncake().encode() + b"\n\xff\xfe\n")
    with pytest.raises(ConfigError, match="line 2: not UTF-8"):
        read_trace(trace)


def test_reading_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_REQUESTS", 2)
    with pytest.raises(ConfigError, match="more than 2 requests"):
        read_trace(write(tmp_path / "many", *[mooncake()] * 3))
    monkeypatch.setattr(traces, "MAX_LINE_BYTES", 200)
    with pytest.raises(ConfigError, match="line 2: more than 200 bytes"):
        read_trace(write(tmp_path / "long", mooncake(), "x" * 201))


def test_the_poisson_load_is_that_of_bench_load() -> None:
    mix = Mix((64, 256), (16, 32))
    arrivals, jobs = poisson(40, 2, mix, 7), poisson_jobs(40, 2, mix, 7)
    assert [(job.input, job.output) for job in jobs] == [(each.input, each.output) for each in arrivals]
    assert [job.at_ns for job in jobs] == [round(each.at_s * 1e9) for each in arrivals]


def test_scaling_and_cutting() -> None:
    jobs = [Job(0, 1, 1), Job(1_000_000_000, 2, 1, (1,), ServiceClass.P0), Job(3_000_000_000, 3, 1)]
    assert [job.at_ns for job in speeded_up(jobs, 2)] == [0, 500_000_000, 1_500_000_000]
    assert speeded_up(jobs, 2)[1] == Job(500_000_000, 2, 1, (1,), ServiceClass.P0)
    assert within(jobs, 3) == jobs[:2]


def test_a_mooncake_line_may_name_a_class(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    lines = [{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]} for _ in range(2)]
    path.write_text("\n".join(json.dumps(line) for line in (lines[0], {**lines[1], "class": "p0"})), encoding="utf-8")
    assert [job.service for job in read_trace(path)] == [ServiceClass.P2, ServiceClass.P0]
    path.write_text(json.dumps({**lines[0], "class": "gold"}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 1: .*gold"):
        read_trace(path)
