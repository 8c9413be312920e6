"""The start of an engine: why it refused survives the channel, its account covers the whole, its log keeps a level."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.checkpoint.shapes import SHAPES, tensor_shapes
from firsttoken.core.clock import NS_PER_S, now_ns
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import CheckpointError, ConfigError, EngineDead
from firsttoken.devices.cpu import CPUDevice, CPUFacts
from firsttoken.engine.launch import engine_process, start_process, start_thread
from firsttoken.engine.resolve import resolve
from firsttoken.engine.run import run_engine
from firsttoken.engine.start_account import StartAccount, process_began_ns
from firsttoken.executor.torch_executor import TorchExecutor
from firsttoken.frontend.link import EngineLink
from firsttoken.observability.logging import setup_logging
from firsttoken.transport.channel import ChannelClosed
from firsttoken.transport.messages import Ready

TINY = "random:tiny-llama"
# The same shape as a folder says it.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 307,
    "hidden_size": 72,
    "intermediate_size": 116,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


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
        (
            {"model": TINY, "device": "cuda"},
            ConfigError,
            "^device 'cuda' cannot be used: this torch is built without CUDA",
        ),
        ({"model": TINY, "max_model_len": 999999}, ConfigError, "^max_model_len must be 1 to 512"),
        ({"model": "random:nonsense"}, CheckpointError, "^random:nonsense: 'nonsense' is not a known shape"),
    ],
)
def test_a_refusal_reaches_who_waits_as_what_it_was(start, args, error, message):
    link = start(**args)
    with pytest.raises(error, match=message):
        link.ready.result(60)
    assert isinstance(link.error, EngineDead), "there is no engine to send requests to"


@pytest.mark.parametrize("args", [{"threads": 1.5}, {"max_num_seqs": "4"}, {"kv_memory": "1GiB"}, {"model": None}])
def test_an_option_of_a_wrong_type_is_refused_before_anything_starts(start, args):
    with pytest.raises(ConfigError, match=rf"engine options: Expected .* at `\$\.{next(iter(args))}`"):
        start(**{"model": TINY, **args})


def test_an_executor_that_cannot_start_says_so_instead_of_waiting():
    checkpoint = open_checkpoint(TINY)
    device = CPUDevice(CPUFacts(threads=1, fast_bf16=False, free_memory=1 << 32))
    config = resolve(EngineArgs(model=TINY, max_num_seqs=1), checkpoint, [device])[1].executor
    with pytest.raises(Exception, match="num_threads"):
        TorchExecutor.load(dataclasses.replace(config, threads=1.5), checkpoint)


def test_a_damaged_tensor_is_told_with_its_file(start, tmp_path):
    """Over the whole way: a number that is not finite is found in a tensor, which does not know its file."""
    weights = {name: torch.full(shape, 0.01) for name, shape in tensor_shapes(SHAPES["tiny-llama"]).items()}
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][3, 4] = float("nan")
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}: {name}: holds NaN"):
        start(model=str(tmp_path)).ready.result(60)


def test_giving_up_on_an_engine_that_starts_is_no_news(start, caplog):
    link = start(model="random:smollm2-135m")
    with caplog.at_level(logging.INFO):
        link.handle.stop(0.01)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_command_that_fails_leaves_no_engine():
    began_ns, handles = now_ns(), []

    def command():
        with engine_process(EngineArgs(model=TINY)) as handle:
            handles.append(handle)
            assert handle.alive()
            raise KeyError

    with pytest.raises(KeyError):
        command()
    assert not handles[0].alive()
    assert began_ns <= handles[0].launched_ns <= now_ns()


def test_a_term_ends_a_command_and_its_engine_at_once():
    code = """
import time
from firsttoken.core.engine_args import EngineArgs
from firsttoken.engine.launch import engine_process

with engine_process(EngineArgs(model="random:tiny-llama")) as handle:
    print(handle.pid, flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        engine = int(command.stdout.readline())
        os.kill(engine, 0)
        command.terminate()
        assert command.wait(20) == 128 + signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            os.kill(engine, 0)


def test_a_signal_sent_to_the_whole_group_spares_an_engine_from_its_first_instant(capfd):
    handle = start_process(EngineArgs(model=TINY))
    link = EngineLink(handle)
    link.listen()
    try:
        for number in range(200):
            os.kill(handle.pid, signal.SIGINT if number % 2 else signal.SIGTERM)
            time.sleep(0.001)
        link.ready.result(60)
    finally:
        handle.stop(10)
    assert "KeyboardInterrupt" not in capfd.readouterr().err


def test_an_engine_that_ignores_signals_holds_none():
    """What the launch held is let go: the processes that an engine starts would inherit it."""
    code = """
import signal, sys, types
from firsttoken.devices import registry
from firsttoken.engine import process

sys.modules["firsttoken.engine.run"] = types.SimpleNamespace(run_engine=lambda *_, **__: True)
registry.begin_devices = lambda device: None
signal.pthread_sigmask(signal.SIG_BLOCK, process.FRONT_END_SIGNALS)
process.main([sys.argv[1], "0", "error", "text", '{"model": "m"}'])
kinds = {signal.getsignal(number).name for number in process.FRONT_END_SIGNALS}
print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), kinds)
"""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        words = [sys.executable, "-c", code, str(theirs.fileno())]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True, pass_fds=[theirs.fileno()])
    assert done.stdout == "[] {'SIG_IGN'}\n"


def test_signals_are_taken_again_after_a_launch(start):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    start(model=TINY)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_an_engine_starts_in_a_folder_of_files_called_as_modules(tmp_path, monkeypatch):
    for name in ("select", "json", "numpy", "torch", "firsttoken"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the module')")
    monkeypatch.chdir(tmp_path)
    link = EngineLink(start_process(EngineArgs(model=TINY)))
    link.listen()
    try:
        link.ready.result(60)
    finally:
        link.handle.stop(10)


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_what_an_engine_prints_stays_out_of_its_channel_when_standard_streams_are_closed(tmp_path, taken):
    """Whichever of the three numbers the channel's two sockets would get."""
    code = f"""
import os, sys
from firsttoken.core.engine_args import EngineArgs
from firsttoken.engine.launch import start_process
from firsttoken.frontend.link import EngineLink
from firsttoken.observability.logging import setup_logging

setup_logging("debug")
held = [os.open(os.devnull, os.O_RDONLY) for _ in range({taken})]
link = EngineLink(start_process(EngineArgs(model="random:tiny-llama")))
link.listen()
with open(sys.argv[1], "w") as file:
    file.write(f"{{held}} {{link.ready.result(60).model}}")
link.fail("the test has seen enough", asked=True)
link.handle.stop(10)
"""
    seen = tmp_path / "seen"
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code, str(seen)]
    assert subprocess.run(closed, timeout=60, check=False).returncode == 0
    assert seen.read_text() == f"{list(range(taken))} {TINY}"


def test_the_parts_of_the_start_sum_to_the_whole(start):
    began = time.monotonic()
    parts = start(model=TINY).ready.result(60).start_ms
    took_ms = 1e3 * (time.monotonic() - began)
    assert {"imports", "checkpoint", "weights", "warm_up"} <= parts.keys()
    # What is left is the way of `Ready` to here and, before the account begins, a process' arguments.
    assert sum(parts.values()) == pytest.approx(took_ms, abs=100)


def test_the_engine_process_logs_as_its_front_end_does(capfd):
    def logged(level, **how):
        setup_logging(level, **how)
        link = EngineLink(start_process(EngineArgs(model=TINY)))
        link.listen()
        link.ready.result(60)
        link.fail("the test has seen enough", asked=True)
        link.handle.stop(10)
        return capfd.readouterr().err

    root, ours = logging.getLogger(), logging.getLogger("firsttoken")
    before = root.level, ours.level
    try:
        assert "INFO  engine.build: device = cpu" in logged("info")
        lines = [msgspec.json.decode(line) for line in logged("info", json_lines=True).splitlines()]
        assert lines
        assert {line["level"] for line in lines} == {"info"}
        assert logged("error") == ""
    finally:
        for handler in [handler for handler in root.handlers if handler.get_name() == "firsttoken"]:
            root.removeHandler(handler)
        root.setLevel(before[0])
        ours.setLevel(before[1])


def test_the_process_began_before_now():
    age_s = (now_ns() - process_began_ns()) / NS_PER_S
    assert 0 <= age_s < 24 * 3600


def test_an_engine_on_the_cpu_imports_little_beside_torch():
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import firsttoken.engine.run, firsttoken.executor.torch_executor, firsttoken.transport.socket_channel\n"
        "tops = {name.partition('.')[0] for name in sys.modules.keys() - before} - sys.stdlib_module_names\n"
        "sys.exit(repr(sorted(tops - {'firsttoken', 'msgspec', 'numpy', 'safetensors'})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip() == "[]"


def test_the_collector_rests_while_the_process_imports():
    code = """
import gc, sys, types
from firsttoken.devices import registry
from firsttoken.engine import process

def begin_devices(device):
    print("collecting" if gc.isenabled() else "resting", gc.get_freeze_count())

def run_engine(*_, **__):
    print("collecting" if gc.isenabled() else "resting", gc.get_freeze_count() > 10_000, len(gc.get_objects()) < 1_000)

registry.begin_devices = begin_devices
sys.modules["firsttoken.engine.run"] = types.SimpleNamespace(run_engine=run_engine)
process.main([sys.argv[1], "0", "error", "text", '{"model": "m"}'])
"""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        words = [sys.executable, "-c", code, str(theirs.fileno())]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True, pass_fds=[theirs.fileno()])
    assert done.stdout.splitlines() == ["resting 0", "collecting True True"]


def test_an_engine_that_starts_does_not_outlive_its_front_end():
    code = """
import sys, time
from firsttoken.devices import registry
from firsttoken.engine import process

registry.begin_devices = lambda device: time.sleep(60)
process.LEAVE_S = 0.1
process.main([sys.argv[1], "0", "error", "text", '{"model": "m"}'])
"""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = subprocess.Popen([sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    assert engine.wait(20) == 1


def test_an_engine_in_its_own_process_has_collected_before_it_is_ready():
    class Channel:
        def send(self, message):
            if isinstance(message, Ready):
                self.frozen = gc.get_freeze_count()

        def receive(self, timeout):
            raise ChannelClosed

        def close(self):
            pass

    frozen = []
    for own_process in (False, True):
        channel = Channel()
        run_engine(EngineArgs(model=TINY, threads=1), channel, StartAccount(), own_process=own_process)
        frozen.append(channel.frozen)
        gc.unfreeze()
    assert frozen[0] == 0
    assert frozen[1] > 10_000


def test_nothing_heavy_is_imported_before_the_account_begins():
    code = "import sys, firsttoken.engine.process; sys.exit(repr({'torch', 'numpy', 'msgspec'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip() == "set()"
