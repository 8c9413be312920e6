"""``firsttoken top``: a picture, an object, a live screen that outlives its server, and plain words."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import termios
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from firsttoken.cli import top_feed
from firsttoken.cli.main import main
from firsttoken.cli.opener import running_or_tls
from firsttoken.cli.top_screen import milliseconds, number, picture, spark
from firsttoken.cli.top_state import LiveState

NONE = {"count": 0, "p50": None, "p90": None, "p95": None, "p99": None}
FIELDS = ["id", "steps", "start", "end", "longest", "decode_rows", "prefill_tokens", "pad_tokens", "plan", "gc"]
FIELDS += ["run_queue", "copy", "uncaptured", "preempted"]


def window(value=None, **more):
    told = NONE if value is None else {"count": 9, "p50": value, "p90": value, "p95": value, "p99": 2 * value}
    return {
        "ttft_ms": told,
        "itl_ms": told,
        "e2e_ms": told,
        "requests_per_s": 0,
        "tokens_per_s": 0,
        "ended": {},
        **more,
    }


def frame(at=0, **changes):
    told = {
        "now_ms": 1e6 + 100 * at,
        "unix_ms": 1_796_000_000_000 + 100 * at,
        "state": "busy",
        "error": None,
        "running": 7,
        "waiting": 3,
        "kv_blocks": {"total": 100, "used": 40, "cached": 30, "free": 30},
        "classes": {"p0": window(12.5, running=2, waiting=0), "p1": window(), "p2": window(1234.0)},
        "outcomes": {"finished": 9, "aborted": 5, "refused": 2, "expired": 1, "failed": 38},
        "rates": {"requests_per_s": 4, "output_tokens_per_s": 321, "prompt_tokens_per_s": 9, "steps_per_s": 50.0}
        | {"tokens_per_step": 7.0},
        "steps": [[at, 1, 1e6 + 100 * at - 8, 1e6 + 100 * at, 8.0, 7, 0, 0, 0.1, 0.0, 0.0, 0.0, 1, 0]],
        "requests": [],
    }
    return told | changes


def first(**changes):
    one = {"id": "req-[red]1", "service_class": "p0", "prompt_tokens": 12, "output_tokens": 34, "ttft_ms": 12.5}
    one |= {"total_ms": 250.0, "outcome": "aborted", "finish_reason": None}
    heat = {name: {"device": [30, 0], "host": [10, 0], "missed": [60, 0]} for name in ("p0", "p1", "p2")}
    hits = {name: {"device": {"asked": 100, "found": 30}, "host": {"asked": 70, "found": 10}} for name in heat}
    restores = {"restores": 5, "cancelled": 1, "restore_s": 0.04, "host_blocks": 512, "host_capacity": 1024}
    kv = {"bytes_per_block": 1 << 20, "hits": hits, "heat": {"positions": [0, 2048], "tokens": heat}, "disk": None}
    return frame(
        engine={"model": "stub", "device": "cpu", "dtype": "float32", "max_num_seqs": 32, "max_model_len": 4096},
        step_fields=FIELDS,
        requests=[one],
        kv=kv | {"restores": restores},
        **changes,
    )


@contextmanager
def server(answer, port=0):
    """A server whose GET is ``answer(handler)``; gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            with suppress(BrokenPipeError, ConnectionResetError):  # the reader has seen enough
                answer(self)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.server_address[1]}"
        finally:
            made.shutdown()


def stream(*told, pause=0.0, key=None):
    def answer(handler):
        assert handler.path.startswith("/dashboard/live?hz=")
        if key is not None and handler.headers.get("Authorization") != f"Bearer {key}":
            return refuse(401)(handler)
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        handler.end_headers()
        for one in told:
            handler.wfile.write(b"data: " + json.dumps(one).encode() + b"\n\n")
            handler.wfile.flush()
            time.sleep(pause)
        return None

    return answer


def raw(data):
    """A stream that ends after it."""

    def answer(handler):
        stream()(handler)
        handler.wfile.write(data)

    return answer


def refuse(status, body=b"{}", location=None):
    def answer(handler):
        handler.send_response(status)
        if location is not None:
            handler.send_header("Location", location)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def test_one_object(capsys):
    with server(stream(first(), frame(1), frame(2))) as url:
        assert main(["top", url + "/v1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["url"], told["engine"]["model"], told["running"]) == (url, "stub", 7)
    assert told["now_ms"] == 1e6 + 200, "the last frame"
    assert [row[0] for row in told["steps"]] == [0, 1, 2], "and all steps that were told"
    assert told["kv"]["heat"]["positions"] == [0, 2048]


def test_one_picture_where_there_is_no_terminal(capsys):
    with server(stream(first(), frame(1), key="secret")) as url:
        assert main(["top", url, "--api-key", "secret"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "firsttoken busy",
        "running 7 of 32",
        "tokens/s 321",
        "not served 41",
        "12.5",
        "1,234",
        "req-[red]1",
        "aborted",
    ):
        assert words in shown, words
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (refuse(401), "asks for a key: give the right one with --api-key"),
        (refuse(404, b"<html>nginx</html>"), "has no live feed: it is not firsttoken's server"),
        (refuse(200, b"<html>hello</html>"), "with no live feed: is it firsttoken's server?"),
        (refuse(503, b'{"error": {"message": "64 listeners read it already."}}'), "503: 64 listeners read it already."),
        (stream("no object"), "of another version?"),
        (stream({"now_ms": 1}), "of another version?"),
        (stream(first(kv_blocks=None)), "of another version?"),
        (stream(first(steps=[[1]])), "of another version?"),
        (stream(first(now_ms=float("nan"))), "of another version?"),
        (stream(first(unix_ms=1e300)), "of another version?"),
        (stream(first(rates=[])), "of another version?"),
        (raw(b'data: {"now_ms"'), "sent what is no frame"),
        (raw(b"data: " + b"[" * 10**5 + b"\n\n"), "sent what is no frame"),
        (raw(b"data: " + b"9" * 10**5 + b"\n\n"), "sent what is no frame"),
        (raw(b"data: \xff\xfe\n\n"), "sent what is no frame"),
        (raw(b"data: " + b" " * 10**6 + b"7" * 10**6), "sent what is no frame"),
        (refuse(302, location="http://127.0.0.1:9/there\x9b"), "on to http://127.0.0.1:9/there?: give the address"),
        (refuse(500, json.dumps({"error": {"message": "\x1b[2Jgone"}}).encode()), "500: ?[2Jgone"),
        (refuse(500, b"[" * 10**5), "500: Internal Server Error"),
    ],
)
def test_what_cannot_be_shown_is_said(capsys, answer, words):
    with server(answer) as url:
        assert main(["top", url, "--once"]) == 1
        shown = capsys.readouterr()
        assert words in shown.err
        assert url in shown.err
        assert not shown.out


def test_a_key_is_not_for_whom_the_server_names(capsys):
    asked = []
    with (
        server(lambda handler: asked.append(handler.headers) or stream(first())(handler)) as other,
        server(refuse(307, location=f"{other}/dashboard/live?hz=10")) as url,
    ):
        assert main(["top", url, "--once", "--api-key", "secret"]) == 1
        assert main(["chat", "--url", url, "--api-key", "secret"]) == 1
        assert capsys.readouterr().err.count(f"on to {other}") == 2
    assert not asked


def test_a_line_without_an_end_fills_no_memory(capsys, monkeypatch):
    monkeypatch.setattr(top_feed, "_MAX_LINE_BYTES", 1000)
    with server(raw(b"data: " + b"x" * 10**6)) as url:
        assert main(["top", url, "--once"]) == 1
        assert "sent what is no frame" in capsys.readouterr().err


def test_what_a_terminal_would_obey_is_not_printed(capsys):
    told = first(error="\x1b]0;title\x07 \x9b2J")
    told["engine"]["model"] = "\x1b[31mred"
    with server(stream(told)) as url:
        assert main(["top", url, "--once"]) == 0
        shown = capsys.readouterr().out
        assert "?[31mred" in shown
        assert not set(shown) & {chr(code) for code in (*range(10), *range(11, 32), *range(127, 160))}


def test_a_picture_for_a_file_is_as_wide_as_it_has_to_be(capsys, monkeypatch):
    told = first()
    told["engine"]["model"] = "m" * 70
    told["requests"][0]["id"] = "r" * 64
    for columns, whole in ((None, True), ("80", False)):
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", columns)
        with server(stream(told)) as url:
            assert main(["top", url, "--once"]) == 0
        shown = capsys.readouterr().out
        for words in ("m" * 70, "r" * 64, "tokens/step", "p95"):
            assert (words in shown) is whole
        assert ("…" not in shown) is whole


def test_nobody_there(capsys):
    with server(refuse(200)) as url:
        pass
    assert main(["top", url]) == 1
    assert "is the server running?" in capsys.readouterr().err


def test_a_server_that_hangs_up_on_plain_http_may_want_https():
    assert running_or_tls("http://here:1", ConnectionResetError()).endswith("say https://here:1")
    assert running_or_tls("https://here:1", ConnectionResetError()) == "is the server running?"
    assert running_or_tls("http://here:1", ConnectionRefusedError()) == "is the server running?"


@pytest.mark.parametrize("words", [["ftp://x"], ["http://x", "--api-key", "a\nb"]])
def test_bad_usage(capsys, words):
    assert main(["top", *words]) == 2
    assert "error: " in capsys.readouterr().err


def render(state, width, height, trouble=None, **options):
    console = Console(width=width, height=height, highlight=False, record=True, file=io.StringIO(), **options)
    console.print(picture(state, width, height, trouble))
    return console.export_text().splitlines()


@pytest.mark.parametrize("size", [(20, 5), (60, 12), (80, 24), (140, 40), (300, 90)])
def test_it_fits_whatever_the_terminal(size):
    width, height = size
    state = LiveState()
    state.add(first())
    for at in range(1, 400):
        state.add(frame(at))
    lines = render(state, width, height)
    assert max(len(line) for line in lines) <= width
    if height >= 24:
        assert len(lines) <= height
        assert any("found at" in line for line in lines)
        assert any("steps" in line and "█" in line for line in lines)
    if height >= 40:
        assert any("latest requests" in line for line in lines)


def test_a_lost_connection_and_a_dead_engine_are_told():
    state = LiveState()
    assert render(state, 80, 24) == ["connecting"]
    state.add(first())
    lines = render(state, 80, 24, trouble="trying again in 3 s: connection refused")
    assert "not connected" in lines[0]
    assert lines[1] == "trying again in 3 s: connection refused"
    state.add(frame(1, state="dead", error="the engine stopped: out of memory"))
    lines = render(state, 80, 24)
    assert "dead" in lines[0]
    assert lines[1] == "the engine stopped: out of memory"


def test_what_is_kept_is_bounded():
    state = LiveState()
    state.add(first())
    for at in range(3000):
        state.add(frame(at, requests=first()["requests"] * 5))
    assert len(state.bars) <= 101
    assert len(state.requests) == 50
    assert {len(values) for values in state.lines.values()} == {300}


def test_numbers():
    assert [number(value) for value in (None, 0, 3, 0.123, 12.34, 1234.5)] == ["-", "0", "3", "0.12", "12.3", "1,234"]
    assert [milliseconds(value) for value in (None, 8.5, 1500, 12_345)] == ["-", "8.50 ms", "1.50 s", "12.3 s"]
    assert spark([0, 1, 2, 4, float("nan")]) == "▁▂▄█ "


@contextmanager
def live(url):
    """``top`` in a real terminal; gives its process and ``until(words, since)``, which waits for what it shows."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(leader, (40, 160))  # no message wraps
    seen = bytearray()

    def read():
        while True:
            try:
                seen.extend(os.read(leader, 65536))
            except OSError:
                return

    def until(words, since=0):
        end = time.monotonic() + 20
        while words not in seen[since:]:
            assert time.monotonic() < end, bytes(seen[-2000:])
            time.sleep(0.02)
        return len(seen)

    threading.Thread(target=read, daemon=True).start()
    command = [sys.executable, "-m", "firsttoken.cli.main", "top", url, "--interval", "100ms"]
    # Named, or it would get the lines and columns too that readline, which pytest imports, sets behind Python's back.
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), follower)
    child = subprocess.Popen(command, **streams, env=environ, start_new_session=True)
    try:
        yield child, until
    finally:
        child.kill()
        child.wait()
        os.close(follower)
    assert b"Traceback" not in seen
    assert seen.rstrip().endswith(b"\x1b[?25h") or b"\x1b[?1049l" in seen, "the terminal is as it was"


def test_the_live_screen_outlives_its_server_and_ends_by_ctrl_c():
    """In a real terminal: shown, the stream ends, it says so, comes back by itself, and Ctrl-C leaves."""
    answer = stream(*([first()] + [frame(at) for at in range(1, 4)]), pause=0.1)
    with server(answer) as url, live(url) as (child, until):
        until(b"running")
        at = until(b"not connected")
        until(b"trying again in")
        until(b"busy", at)
        child.send_signal(2)
        assert child.wait(10) == 130


def test_the_live_screen_waits_for_a_server_that_is_not_there_yet():
    with server(refuse(404)) as url:
        pass
    with live(url) as (child, until):
        until(b"trying again in")
        until(b"is the server running?")
        with server(stream(first(), frame(1)), port=int(url.rpartition(":")[2])):
            until(b"busy")
            child.send_signal(2)
            assert child.wait(10) == 130
