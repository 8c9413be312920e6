"""Log lines for people and for machines; no caller can forge one."""

import io
import json
import logging
import subprocess
import sys

import pytest

from firsttoken.observability.logging import MAX_ID, clean_id, setup_logging


@pytest.fixture
def logs():
    """`logs(**options)` sets logging up and returns the stream."""
    root, own = logging.getLogger(), logging.getLogger("firsttoken")
    before = root.level, own.level, list(root.handlers)

    def start(level="info", **options):
        stream = io.StringIO()
        setup_logging(level, stream=stream, **options)
        return stream

    yield start
    root.setLevel(before[0])
    own.setLevel(before[1])
    root.handlers[:] = before[2]


def test_human_lines(logs):
    stream = logs()
    logging.getLogger("firsttoken.engine").info("loaded %d tensors", 12, extra={"request_id": "a\nb"})
    logging.getLogger("firsttoken.engine").debug("not shown")
    line = stream.getvalue()
    assert line.endswith(" INFO  engine: loaded 12 tensors  request_id=ab\n")
    assert line.count("\n") == 1


def test_a_message_cannot_forge_a_line_or_colour_the_terminal(logs):
    stream = logs()
    logging.getLogger("firsttoken").warning("prompt: %s", "x\n12:00 INFO ok\x1b[31m")
    assert stream.getvalue().endswith("prompt: x\\n12:00 INFO ok\\x1b[31m\n")
    assert stream.getvalue().count("\n") == 1


def test_human_exceptions_keep_their_traceback(logs):
    stream = logs()
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logging.getLogger("firsttoken").exception("step failed")
    assert "Traceback" in stream.getvalue()
    assert "RuntimeError: broken" in stream.getvalue()


def test_json_lines(logs):
    stream = logs(json_lines=True)
    log = logging.getLogger("firsttoken.server")
    log.error("bad\n\udc80 %s", "é", extra={"request_id": "r\x00-1", "ms": 1.5, "odd": {"k": {1, 2}.__class__}})
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["message"] == "bad\n? é"
    assert (first["level"], first["logger"], first["request_id"], first["ms"]) == (
        "error",
        "firsttoken.server",
        "r-1",
        1.5,
    )
    assert first["time"].endswith("+00:00")
    assert "set" in first["odd"]["k"]
    assert "ValueError: no" in second["exception"]


def test_other_libraries_are_heard_from_warnings_up(logs):
    stream = logs("debug")
    logging.getLogger("somelib").info("chatter")
    logging.getLogger("somelib").warning("careful")
    logging.getLogger("firsttoken.x").debug("detail")
    assert "chatter" not in stream.getvalue()
    assert "careful" in stream.getvalue()
    assert "detail" in stream.getvalue()


def test_setting_up_again_replaces(logs):
    first, second = logs(), logs()
    logging.getLogger("firsttoken").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_unknown_level(logs):
    with pytest.raises(ValueError, match="loud"):
        logs("loud")


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("chatcmpl-1", "chatcmpl-1"),
        ("a\r\nSet-Cookie: x", "aSet-Cookie: x"),
        ("\x1b[2J\x00\x7f\x85", "[2J"),
        ("r\u202eev\u2028\u2029\ud800", "rev"),
        ("ключ 钥匙", "ключ 钥匙"),
        ("x" * 10**6, "x" * MAX_ID),
        ("\n" * 10**6, ""),
    ],
)
def test_clean_id(raw, clean):
    assert clean_id(raw) == clean


UNCAUGHT = """
import sys, threading, warnings
from firsttoken.observability.logging import setup_logging

def boom():
    raise RuntimeError("two\\nlines")

setup_logging("info", json_lines=True)
warnings.warn("careful")
thread = threading.Thread(target=boom, name="worker")
thread.start()
thread.join()
boom()
"""


def test_what_nobody_caught_is_one_object_too():
    done = subprocess.run([sys.executable, "-c", UNCAUGHT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    warning, thread, main = (json.loads(line) for line in done.stderr.splitlines())
    assert (warning["level"], warning["logger"]) == ("warning", "py.warnings")
    assert "UserWarning: careful" in warning["message"]
    assert (thread["level"], thread["message"]) == ("error", "thread worker ended with an error")
    assert (main["level"], main["message"]) == ("critical", "nobody caught this error")
    for one in (thread, main):
        assert one["exception"].startswith("Traceback (most recent call last):")
        assert one["exception"].endswith("RuntimeError: two\nlines")
