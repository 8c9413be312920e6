"""The start of an engine: why it refused survives the channel, its account covers the whole, its log keeps a level."""

from __future__ import annotations

import logging
import subprocess
import sys
import time

import pytest

from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import CheckpointError, ConfigError, EngineDead
from firsttoken.engine.launch import start_process, start_thread
from firsttoken.frontend.link import EngineLink

TINY = "random:tiny-llama"


@pytest.fixture(params=[start_process, start_thread], ids=["process", "thread"])
def start(request):
    """Starts an engine; gives its link, listening."""
    links = []

    def go(**args):
        links.append(EngineLink(request.param(EngineArgs(**args))))
        links[-1].listen()
        return links[-1]

    yield go
    for link in links:
        link.handle.stop(10)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ({"model": TINY, "device": "cuda"}, ConfigError, "^device 'cuda' is not supported"),
        ({"model": TINY, "max_model_len": 999999}, ConfigError, "^max_model_len must be 1 to 512"),
        ({"model": "random:nonsense"}, CheckpointError, "^random:nonsense: 'nonsense' is not a known shape"),
    ],
)
def test_a_refusal_reaches_who_waits_as_what_it_was(start, args, error, message):
    link = start(**args)
    with pytest.raises(error, match=message):
        link.ready.result(60)
    assert isinstance(link.error, EngineDead), "there is no engine to send requests to"


def test_the_parts_of_the_start_sum_to_the_whole(start):
    began = time.monotonic()
    parts = start(model=TINY).ready.result(60).start_ms
    took_ms = 1e3 * (time.monotonic() - began)
    assert {"imports", "checkpoint", "weights", "warm_up"} <= parts.keys()
    # What is left is the way of `Ready` to here and, before the account begins, a process' arguments.
    assert sum(parts.values()) == pytest.approx(took_ms, abs=100)


def test_the_engine_process_logs_at_the_level_of_its_front_end(capfd):
    def logged(level):
        logging.getLogger("firsttoken").setLevel(level)
        link = EngineLink(start_process(EngineArgs(model=TINY)))
        link.listen()
        link.ready.result(60)
        link.handle.stop(10)
        return capfd.readouterr().err

    before = logging.getLogger("firsttoken").level
    try:
        assert "INFO engine: device = cpu" in logged(logging.INFO)
        assert logged(logging.ERROR) == ""
    finally:
        logging.getLogger("firsttoken").setLevel(before)


def test_nothing_heavy_is_imported_before_the_account_begins():
    code = "import sys, firsttoken.engine.process; sys.exit(repr({'torch', 'numpy', 'msgspec'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip() == "set()"
