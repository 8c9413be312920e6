"""Phases against servers that take known times, noted by themselves."""

from __future__ import annotations

import shutil
import socket
import statistics
import subprocess
import sys
import time

import pytest

from firsttoken.core.clock import NS_PER_MS
from firsttoken.core.tls import client_context
from firsttoken.diagnose import connection as connection_module
from firsttoken.diagnose.endpoint import Endpoint
from firsttoken.diagnose.probe import Ask, Probe
from firsttoken.diagnose.sample import Sample
from firsttoken.observability.percentiles import percentile
from tests.diagnose.double import Double, delaying_proxy, own_process

pytestmark = pytest.mark.clock

REQUESTS = 8


def probe_of(url: str, certificate=None) -> Probe:
    endpoint = Endpoint.parse(url)
    return Probe(endpoint, client_context(str(certificate.file)) if endpoint.secure else None, timeout_s=10)


def ask(number: int = 0, tokens: int = 8) -> Ask:
    return Ask("double", "a few words", tokens, f"test-{number}")


def samples_of(probe: Probe, count: int = REQUESTS) -> list[Sample]:
    return [probe.once(ask(number)) for number in range(count)]


def near(measured: list[float], true: list[float]) -> bool:
    """The difference of pairs is within 3 % or 1 ms: its lower quartile, for a busy machine adds to some of them."""
    off = sorted(abs(one - other) for one, other in zip(measured, true, strict=True))
    return percentile(off, 0.25) <= max(1.0, 0.03 * statistics.median(true))


def apart(double: Double, probe: Probe) -> dict[str, tuple[list[float], list[float]]]:
    """The phases that are not near what the server took, in each of three rounds: a machine that is busy with others
    for a whole round delays all of it."""
    far: dict[str, tuple[list[float], list[float]]] = {}
    for _ in range(3):
        double.took.clear()
        double.handshakes.clear()
        samples = samples_of(probe)
        until = time.monotonic() + 5
        while len(double.took) < len(samples) and time.monotonic() < until:
            time.sleep(0.001)  # the server notes what it took behind its last byte
        true = {name: [took[name] for took in double.took] for name in ("ttfb", "first_token", "gaps", "transfer")}
        if double.context is not None:
            true["tls"] = list(double.handshakes)
        found = {name: [one.phases[name] for one in samples] for name in true}
        far = {name: (found[name], true[name]) for name in true if not near(found[name], true[name])}
        if not far:
            break
    return far


@pytest.mark.parametrize(("phase", "delay"), [("think_ms", 40), ("first_ms", 30), ("gap_ms", 12), ("end_ms", 25)])
def test_each_delay_of_the_server_is_found_in_its_phase(phase: str, delay: float) -> None:
    with Double(**{phase: delay}).running() as double:
        assert not apart(double, probe_of(double.url))
        one = probe_of(double.url).once(ask())
    assert sum(double.took[0].values()) > delay
    assert sum(one.phases.values()) == pytest.approx(one.total_ms, rel=1e-9)


def test_all_delays_together_behind_tls(certificate) -> None:
    double = Double(tls_ms=35, think_ms=50, first_ms=20, gap_ms=9, end_ms=15, context=certificate.context)
    with double.running():
        assert not apart(double, probe_of(double.url, certificate))
        facts = probe_of(double.url, certificate).once(ask()).tls
    assert facts.version == "TLSv1.3"
    assert not facts.resumed
    if sys.platform.startswith("linux"):
        assert 300 < facts.server_bytes < 3000


def test_name_and_connect_are_told_apart(monkeypatch) -> None:
    took: dict[str, list[float]] = {"dns": [], "tcp": []}

    def slept(phase: str, ms: float) -> None:
        began = time.monotonic()
        time.sleep(ms / 1e3)
        took[phase].append((time.monotonic() - began) * 1e3)

    class SlowSocket(socket.socket):
        def connect(self, address) -> None:
            slept("tcp", 22)
            super().connect(address)

    def slow_lookup(*args, **options):
        slept("dns", 31)
        return resolve(*args, **options)

    resolve = socket.getaddrinfo
    with Double().running() as double:
        probe = probe_of(f"http://127.0.0.1:{double.port}")
        with monkeypatch.context() as patch:
            patch.setattr(connection_module.socket, "socket", SlowSocket)
            patch.setattr(connection_module.socket, "getaddrinfo", slow_lookup)
            samples = samples_of(probe)
    for name, true in took.items():
        assert near([one.phases[name] for one in samples], true), name


def test_a_delaying_proxy_is_seen_in_each_round_trip(certificate) -> None:
    took: list[float] = []
    with Double(think_ms=10, context=certificate.context).running() as double:
        direct = samples_of(probe_of(double.url, certificate))
        with delaying_proxy(double.port, 40, took) as port:
            behind = samples_of(probe_of(f"https://localhost:{port}", certificate))
    there_and_back = 2 * percentile(sorted(took), 0.25)
    for name in ("tls", "ttfb"):
        added = [min(one.phases[name] for one in each) for each in (behind, direct)]
        # A handshake computes for some ms, and longer while others do.
        assert added[0] - added[1] == pytest.approx(there_and_back, rel=0.12, abs=1), name


def test_a_reused_connection_has_no_set_up(certificate) -> None:
    with Double(context=certificate.context).running() as double:
        probe = probe_of(double.url, certificate)
        connection = probe.open()
        first, second = probe.ask(connection, ask(1)), probe.ask(connection, ask(2))
        connection.close()
    assert first.setup_ms > 0
    assert not first.reused
    assert second.setup_ms == 0
    assert second.reused
    assert second.keep_alive


def test_a_session_can_be_resumed(certificate) -> None:
    with Double(context=certificate.context).running() as double:
        probe = probe_of(double.url, certificate)
        connection = probe.open()
        probe.ask(connection, ask())
        again = probe.open(connection.session)
        connection.close()
        again.close()
    assert again.tls.resumed


def text(content: str = "", reasoning: str = "", **more) -> dict:
    delta = {"content": content, **({"reasoning_content": reasoning} if reasoning else {})}
    return {"choices": [{"delta": delta}], **more}


def test_the_first_token_is_the_first_text_and_reasoning_is_told_apart() -> None:
    """A role-only event, reasoning at 100 ms, five tokens in one event at 300 ms, then one each 20 ms."""
    singles = [text(f" w{number}") for number in range(10)]
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        text(reasoning="hm"),
        text("five tokens in one event"),
        *singles,
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 16}},
    ]
    with Double(events=events, gaps_ms=[100, 200, *[20] * 10, 0]).running() as double:
        one = probe_of(double.url).once(ask(tokens=16))
    _, reasoning, answer, *_, last, _ = (stamp * 1e3 for stamp in double.stamps[0])
    began = one.began_ns / NS_PER_MS
    assert one.ttft_ms == pytest.approx(reasoning - began, abs=15)
    assert one.answer_ms == pytest.approx(answer - began, abs=15)
    assert (one.tokens, one.tokens_after_first) == (16, 15)
    assert one.tpot_ms * 15 == pytest.approx(last - reasoning, abs=15)
    assert len(one.gaps_ms) == 11


def test_all_tokens_in_one_event_make_no_rate() -> None:
    events = [text("all at once"), {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 16}}]
    with Double(events=events).running() as double:
        one = probe_of(double.url).once(ask(tokens=16))
    assert one.tpot_ms is None
    assert one.gaps_ms == []


def test_a_load_balancers_stamps_are_read() -> None:
    stamps = ("Server-Timing: lb;dur=7.5, total;dur=1", "X-Request-Id: theirs")
    with Double(headers=stamps).running() as double:
        one = probe_of(double.url).once(ask())
    assert one.proxy_ms == 7.5
    assert one.request_id == "theirs"
    with Double(think_ms=30, headers=("X-Envoy-Upstream-Service-Time: 10",)).running() as double:
        one = probe_of(double.url).once(ask())
    assert one.proxy_ms == pytest.approx(one.phases["ttfb"] - 10, abs=1)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here")
def test_phases_agree_with_curls(certificate) -> None:
    """Paired, one after the other, on the same server. Compared are the fastest tenths, for a busy machine adds to the
    others; a difference that is there on a machine that is busy for long gets more pairs to go away in.

    The handshake is long enough for 2 % of it to be more than what curl does before it begins one: it counts the
    making of its TLS context, some 0.3 to 0.9 ms, as part of the phase.
    """
    delays = {"tls_ms": 60, "think_ms": 40, "first_ms": 25, "gap_ms": 5, "end_ms": 10}
    pairs: dict[str, list[tuple[float, float]]] = {}
    with own_process(certificate.file, certificate.key, **delays) as port:
        probe = probe_of(f"https://127.0.0.1:{port}", certificate)
        for _ in range(4):
            for _ in range(16):
                one, theirs = probe.once(ask()), curls_phases(probe, certificate)
                for phase, other in theirs.items():
                    pairs.setdefault(phase, []).append((one.phases.get(phase, one.total_ms), other))
            if not (apart := differing(pairs)):
                return
    pytest.fail(f"(ours, curl's) in ms: {apart}")


def curls_phases(probe: Probe, certificate) -> dict[str, float]:
    """ms of each phase that curl tells."""
    stamps = ("namelookup", "connect", "appconnect", "pretransfer", "starttransfer", "total")
    wanted = " ".join(f"%{{time_{stamp}}}" for stamp in stamps)
    curl = ["curl", "-s", "--http1.1", "-o", "/dev/null", "-w", wanted, "--cacert", str(certificate.file)]
    body = probe.dialect.body("double", "a few words", 8)
    command = [*curl, "-d", body, f"{probe.endpoint}/v1/chat/completions"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=20)
    name, tcp, tls, ready, first, total = (float(word) * 1e3 for word in done.stdout.split())
    return {"tcp": tcp - name, "tls": tls - tcp, "ttfb": first - ready, "total": total}


def differing(pairs: dict[str, list[tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """The phases that are further apart than 2 % and 0.3 ms."""
    found = {}
    for phase, both in pairs.items():
        ours, curls = (percentile(sorted(side), 0.1) for side in zip(*both, strict=True))
        if abs(ours - curls) > max(0.3, 0.02 * curls):
            found[phase] = (ours, curls)
    return found


def test_stamps_are_on_the_one_clock() -> None:
    began = time.monotonic_ns()
    with Double().running() as double:
        one = probe_of(double.url).once(ask())
    assert began < one.began_ns <= one.ended_ns < time.monotonic_ns()
    assert one.total_ms < (time.monotonic_ns() - began) / NS_PER_MS
