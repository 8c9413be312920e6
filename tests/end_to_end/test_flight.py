"""The flight recorder of a real server: on a signal, when its engine is killed, and when it is killed itself."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from firsttoken import LLM, SamplingParams
from firsttoken.cli import main as cli
from firsttoken.observability.flight_file import Flight, read_flight


class Server:
    """``firsttoken serve`` of a tiny model."""

    def __init__(self, folder: Path, *options: str, on_pid: Callable[[int], object] = id) -> None:
        command = [
            sys.executable,
            "-m",
            "firsttoken.cli.main",
            "serve",
            "random:tiny-llama",
            "--port",
            "0",
            "--threads",
            "1",
        ]
        command += ["--kv-memory", "8MiB", "--max-num-seqs", "8", "--flight-dir", str(folder), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        on_pid(self.process.pid)
        self.folder = folder
        banner = ""
        while (found := re.search(r"http://127\.0\.0\.1:(\d+)", banner)) is None:
            line = self.process.stdout.readline()
            assert line, self.process.stderr.read()
            banner += line
        self.port = int(found.group(1))

    def ask(self, prompt: list[int], tokens: int, **fields: Any) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, **fields}
        connection.request("POST", "/v1/completions", json.dumps(body))
        return json.loads(connection.getresponse().read())

    @property
    def engine_pid(self) -> int:
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        children = [pid for thread in threads for pid in thread.read_text().split()]
        names = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        [engine] = [pid for pid, name in names.items() if b"firsttoken.engine.process" in name]
        return engine

    def flight(self, count: int = 1) -> Flight:
        """The newest of ``count`` files, once there are so many."""
        deadline = time.monotonic() + 30
        while len(files := sorted(self.folder.glob("*.jsonl"))) < count:
            assert time.monotonic() < deadline, "no file was written"
            time.sleep(0.02)
        return read_flight(files[-1])

    def end(self) -> str:
        """What it wrote to stderr."""
        self.process.terminate()
        try:
            return self.process.communicate(timeout=40)[1]
        finally:
            self.process.kill()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(*options: str, **more: Any) -> Server:
        servers.append(Server(tmp_path / "flights", *options, **more))
        return servers[-1]

    yield make
    for server in servers:
        server.process.kill()
        server.process.communicate()


def test_a_signal_writes_what_the_server_did_and_it_goes_on(serve):
    server = serve()
    server.ask([3] * 200, 5, service_tier="p0")
    server.ask([3] * 200 + [4], 7)
    os.kill(server.process.pid, signal.SIGUSR1)
    flight = server.flight()
    assert [(one.prompt_tokens, one.output_tokens, one.service) for one in flight.requests] == [
        (200, 5, 0),
        (201, 7, 2),
    ]
    assert flight.requests[1].cached_tokens >= 128
    assert flight.requests[0].pieces[0] == flight.requests[1].pieces[0]
    assert sum(step.prefill_tokens for step in flight.steps) == 401 - flight.requests[1].cached_tokens
    assert (flight.head.reason, flight.head.info.max_num_seqs) == ("SIGUSR1", 8)
    assert server.ask([5], 3)["usage"]["completion_tokens"] == 3
    os.kill(server.process.pid, signal.SIGUSR1)
    assert len(server.flight(2).requests) == 3
    assert str(server.folder) in server.end()


@pytest.mark.clock
def test_a_real_load_is_run_again(serve, capsys):
    server = serve("--max-model-len", "500")
    rng = random.Random(4)
    threads = []
    for number in range(40):
        prompt = [3] * 140 * (number % 2) + [number] * rng.randint(20, 120)
        fields = {"service_tier": rng.choice(["p0", "p2"])}
        threads.append(threading.Thread(target=server.ask, args=(prompt, rng.randint(10, 60)), kwargs=fields))
        threads[-1].start()
        time.sleep(rng.expovariate(25))
    for thread in threads:
        thread.join(60)
    os.kill(server.process.pid, signal.SIGUSR1)
    flight = server.flight()
    [path] = server.folder.glob("*.jsonl")
    assert cli.main(["replay", str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    recorded, [again] = result["recorded"], result["replayed"]
    assert result["step_times"]["source"] == "recording"
    assert {name: one["requests"] for name, one in again["classes"].items()} == {
        name: sum(one.service == service for one in flight.requests) for service, name in ((0, "p0"), (2, "p2"))
    }
    assert 0.5 < again["steps"] / recorded["steps"] < 2
    assert again["hit_ratio"] == pytest.approx(recorded["hit_ratio"], abs=0.1)
    for name, was in recorded["classes"].items():
        # Others' work comes and goes during a recording, and a queue makes much of little: it is no unit that is wrong.
        for figure, factor in (("ttft_ms", 20), ("itl_ms", 5), ("e2e_ms", 5)):
            ratio = again["classes"][name][figure]["p50"] / was[figure]["p50"]
            assert 1 / factor < ratio < factor, (name, figure)


def test_a_killed_engine_leaves_a_recording_and_another_takes_its_place(serve):
    server = serve()
    server.ask([3] * 50, 5)
    running = threading.Thread(target=server.ask, args=([4] * 50, 900))
    running.start()
    time.sleep(0.3)
    killed = server.engine_pid
    os.kill(killed, signal.SIGKILL)
    running.join(40)
    flight = server.flight()
    assert flight.head.reason.startswith("engine died")
    assert [one.outcome for one in flight.requests] == ["finished", "failed"]
    assert flight.requests[1].output_tokens > 1
    assert len(flight.steps) > 5
    assert "engine died" in [event.kind for event in flight.events]
    while "choices" not in (again := server.ask([3] * 50, 5)):
        assert again["error"]["code"] == "engine_restarting"
        time.sleep(0.1)
    assert again["usage"]["completion_tokens"] == 5
    assert server.engine_pid != killed
    assert str(server.folder) in server.end()


def test_a_killed_front_end_leaves_the_engines_steps(serve):
    server = serve()
    server.ask([3] * 50, 20)
    engine = server.engine_pid
    server.process.kill()
    flight = server.flight()
    assert (flight.head.source, flight.head.pid) == ("engine", engine)
    assert flight.head.info.model == "random:tiny-llama"
    assert sum(step.decode_rows for step in flight.steps) == 19
    assert flight.requests == []
    deadline = time.monotonic() + 30
    while Path(f"/proc/{engine}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def takes_the_signal(pid: int) -> bool:
    """It is caught or ignored there: it does not end the process."""
    told = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    bit = 1 << (signal.SIGUSR1 - 1)
    return bool((int(told["SigCgt"], 16) | int(told["SigIgn"], 16)) & bit)


def test_signals_at_the_start_and_at_the_end_cost_nothing(serve):
    ended = threading.Event()
    pids: list[int] = []

    def signals() -> None:
        """From when the server knows the signal until it is gone."""
        while not ended.wait(0.003):
            with contextlib.suppress(OSError):
                if pids and takes_the_signal(pids[0]):
                    os.kill(pids[0], signal.SIGUSR1)

    sender = threading.Thread(target=signals)
    sender.start()
    try:
        server = serve(on_pid=pids.append)
        assert server.ask([5], 3)["usage"]["completion_tokens"] == 3
        os.kill(server.engine_pid, signal.SIGUSR1)
        assert server.ask([5], 3)["usage"]["completion_tokens"] == 3
        stderr = server.end()
    finally:
        ended.set()
        sender.join()
    assert server.process.returncode == 0
    assert stderr.count("nothing to dump before the engine is ready") == 1
    assert "Traceback" not in stderr


def test_an_orderly_end_leaves_nothing(serve):
    server = serve()
    server.ask([3] * 50, 5)
    server.end()
    assert list(server.folder.iterdir()) == []  # the start made it, to see that it can be written


def test_an_engine_in_the_same_process_is_recorded_too(tmp_path):
    with LLM("random:tiny-llama", threads=1, kv_memory=8 << 20, flight_dir=str(tmp_path)) as llm:
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=4, ignore_eos=True))
        path = llm.flight.dump("asked for").result(10)
    flight = read_flight(path)
    assert [one.output_tokens for one in flight.requests] == [4, 4]
    assert sum(step.prefill_tokens + step.decode_rows for step in flight.steps) == 5 + 6
