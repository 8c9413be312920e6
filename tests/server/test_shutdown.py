"""Real signals to a real process: the first drains, the second stops at once."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import time

import pytest

from firsttoken.core.errors import ConfigError
from firsttoken.server.config import ServerConfig
from firsttoken.server.run import run_server
from firsttoken.server.supervisor import Supervisor


def test_the_start_is_told_and_the_line_works(start):
    server = start()
    assert "serves stub on http://127.0.0.1:" in server.banner[0]
    assert max(map(len, server.banner)) <= 100  # with the line's end
    text = "".join(server.banner)
    assert f"process {server.process.pid}\n" in text
    assert re.search(r"^  ready after \d+ ms", text, re.MULTILINE)
    line = text.partition("try: ")[2].replace("\\\n", "").strip()
    url, body = re.search(r"^curl -s (http://\S+)\s+-d '(.*)'$", line).groups()
    assert json.loads(body)["temperature"] == 0
    reply = server.ask("POST", url.partition(str(server.port))[2], json.loads(body) | {"max_tokens": 2})
    assert json.load(reply)["choices"][0]["message"]["content"] == "xx"


def test_drain(start):
    server = start()
    stream = server.stream(80)
    server.signal()
    time.sleep(0.1)
    refused = server.ask("POST", "/v1/completions", {"prompt": "hi"})
    assert refused.status == 503
    assert int(refused.headers["Retry-After"]) > 0
    assert server.ask("GET", "/health/live").status == 200
    assert server.ask("GET", "/health/ready").status == 503
    rest = stream.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert rest.count(b'"text":"x') >= 70
    assert server.wait(5) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_stops_at_once(start, number):
    server = start()
    stream = server.stream(4000)
    server.signal()
    time.sleep(0.1)
    began = time.monotonic()
    server.signal(number)
    rest = stream.read()
    assert b'"code":"server_stopping"' in rest
    assert b"[DONE]" not in rest
    assert server.wait(5) == 1
    assert server.said().count("stopped: 1 request was ended early") == 1
    assert time.monotonic() - began < 3


def test_the_grace_time_is_bounded(start):
    server = start(drain_s=0.3)
    stream = server.stream(4000)
    began = time.monotonic()
    server.signal()
    assert b'"code":"server_stopping"' in stream.read()
    assert server.wait(5) == 1
    assert "stopped: 1 request was ended early" in server.said()
    assert time.monotonic() - began < 3


@pytest.mark.clock
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_at_once(start, number):
    server = start()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request("GET", "/health")
    assert connection.getresponse().read()
    began = time.monotonic()
    server.signal(number)  # with an idle connection open
    assert server.wait(5) == 0
    assert time.monotonic() - began < 2
    assert "stopped" not in server.said()


def test_sigterm_before_the_start_is_done(start):
    server = start(start_s=2)
    time.sleep(0.2)
    server.signal()
    assert server.wait(8) == 1
    assert "serves" not in server.process.stdout.read()
    assert "stopped before it was ready" in server.process.stderr.read()


def test_an_address_in_use_is_found_before_the_engine_starts():
    async def launch():
        pytest.fail("the engine was started")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:"):
            run_server(ServerConfig(port=taken.getsockname()[1]), launch)
    with pytest.raises(ConfigError, match="cannot listen on"):
        run_server(ServerConfig(host="no.such.host.invalid"), launch)


def test_of_two_servers_that_bound_one_address_the_later_says_why_it_ends():
    ended = []

    class Engine:
        async def shutdown(self):
            ended.append(True)

    with socket.socket() as rival:
        rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rival.bind(("127.0.0.1", 0))

        async def launch():
            rival.listen()
            return Engine()

        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use"):
            run_server(ServerConfig(port=rival.getsockname()[1]), launch)
    assert ended


def test_every_line_of_a_log_for_machines_is_an_object_and_a_drain_says_what_is_left(start, tmp_path, monkeypatch):
    systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    systemd.settimeout(10)
    systemd.bind(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "400000")
    server = start(log_format="json")
    first = server.records[0]
    assert (first["message"], first["served_model"], first["level"]) == ("ready", "stub", "info")
    assert sum(first["start_ms"].values()) == 2 * first["start_ms"]["total"]
    assert server.ask("GET", "/nope").status == 404
    short, long = server.stream(60), server.stream(4000)
    server.signal()
    assert short.read().endswith(b"[DONE]\n\n")
    said = [json.loads(server.process.stderr.readline()) for _ in range(3)]  # the last after a second
    server.signal()
    assert b'"code":"server_stopping"' in long.read()
    assert server.wait(5) == 1
    said += [json.loads(line) for line in server.said().splitlines()]
    told = [one["message"] for one in said if one["logger"] == "firsttoken.server.ending"]
    assert told[0] == "draining: 2 requests running, up to 30 s; a second signal stops at once"
    assert re.fullmatch(r"draining: 1 request still running, 2\d s left", told[1])
    assert told[2:] == ["stopped: 1 request was ended early"]
    refused = next(one for one in said if one.get("status") == 404)
    assert (refused["path"], refused["message"]) == ("/nope", "refused")
    assert server.process.stdout.read() == "", "what is for people is not said"
    with systemd:
        heard = [systemd.recv(99)]
        while set(heard) != {b"READY=1", b"WATCHDOG=1", b"STOPPING=1"}:
            heard.append(systemd.recv(99))
    assert heard.index(b"READY=1") < heard.index(b"STOPPING=1")


@pytest.mark.parametrize("address", ["", "/no/such/socket", "@nobody-listens-here", "x" * 200])
def test_a_supervisor_that_is_not_there_harms_nobody(address):
    supervisor = Supervisor.of({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "x"}, 1)
    for tell in (supervisor.ready, supervisor.alive, supervisor.stopping, supervisor.close):
        tell()
