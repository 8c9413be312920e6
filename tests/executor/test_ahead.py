"""Compiling ahead: what is planned, who is told what is ready, and that nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from firsttoken.core.errors import ConfigError
from firsttoken.core.kv_format import KVFormat
from firsttoken.executor.ahead.client import AheadCompiler
from firsttoken.executor.ahead.gpus import KNOWN, known_gpu
from firsttoken.executor.ahead.marks import is_done, mark_done
from firsttoken.executor.ahead.messages import Order, Progress, Report
from firsttoken.executor.ahead.plan import (
    GREEDY,
    RANDOM,
    all_keys,
    captured_with,
    class_of,
    first_keys,
    urgent_keys,
)
from firsttoken.executor.ahead.process import Foreman
from firsttoken.executor.ahead.readiness import Readiness
from firsttoken.executor.config import ExecutorConfig
from firsttoken.executor.graphs.captures import Captures, Graph
from firsttoken.executor.graphs.profiles import ShapeTable, StepShape
from firsttoken.sampling.device.params import Needs
from tests.support.tiny_models import make_config

SCRIPT = Path(__file__).with_name("ahead_script.py")


def make_order(**changes: object) -> Order:
    config = make_config("LlamaForCausalLM")
    kv = KVFormat(dtype="bfloat16", layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim)
    executor = ExecutorConfig(
        device="cuda",
        dtype="bfloat16",
        quantization="none",
        kv_format=kv,
        kv_blocks=8,
        max_num_seqs=4,
        max_model_len=96,
        max_step_tokens=64,
        threads=1,
        adaptive_threads=False,
    )
    return Order(model=config, executor=executor, gpu=KNOWN["h200"], processes=2, quietly=True)


# ------------------------------------------------------------------ the plan


@pytest.mark.parametrize(("slots", "tokens"), [(1, 16), (4, 64), (64, 8192)])
def test_the_plan_begins_with_the_first_answer_and_holds_every_decode_and_prompt_shape(slots, tokens):
    table = ShapeTable(slots, tokens, 64)
    keys, urgent, first = all_keys(table), urgent_keys(table), first_keys(table)
    assert keys[: len(urgent)] == urgent
    assert urgent[: len(first)] == first
    assert len(set(keys)) == len(keys)
    known = set(keys)
    for needs in (GREEDY, RANDOM, None):
        assert all(captured_with((shape, needs)) in known for shape in table.decode_shapes())
    for count in range(1, tokens + 1, 7):
        assert (table.shape(0, [count], 1), RANDOM) in known
        assert (table.shape(0, [count], 0), RANDOM) in known


def test_mixed_steps_are_planned_for_any_number_of_decode_rows():
    table = ShapeTable(64, 2048, 64)
    known = set(all_keys(table))
    for rows in range(1, 64):
        for tokens in (1, 17, 200, 512):
            for samples in (0, 1):
                assert (table.shape(rows, [tokens], samples), RANDOM) in known, (rows, tokens, samples)


def test_needs_fall_into_what_graphs_can_do():
    assert class_of(Needs.NOTHING) == GREEDY
    assert class_of(Needs.SEARCH) == RANDOM
    assert class_of(Needs.RANDOM | Needs.SEARCH) == RANDOM
    assert class_of(Needs.EDITS) is None
    assert class_of(Needs.RANDOM | Needs.LOGPROBS) is None


def test_a_gpu_is_known_by_its_name():
    assert known_gpu("H200").name == "NVIDIA H200"
    assert known_gpu("sm_90").capability == 90
    assert known_gpu("RTX 4090") is known_gpu("rtx4090") is KNOWN["rtx-4090"]
    with pytest.raises(ConfigError, match=r"gpu must be one of h200, .* got 'voodoo'"):
        known_gpu("voodoo")


# ------------------------------------------------------------------ counting


def test_a_key_is_ready_when_all_jobs_up_to_its_last_are_done():
    said: list[Progress] = []
    foreman = Foreman(said.append)
    foreman.need(2)
    foreman.need(2)
    foreman.need(3)
    foreman.hear(Report(1))
    assert said[-1].ready == 0
    foreman.hear(Report(0))
    assert said[-1].ready == 2
    foreman.expect(4)
    foreman.hear(Report(2, "CompilationError: no"))
    foreman.hear(Report(3))
    foreman.check()
    foreman.finish()
    assert said[-1] == Progress(ready=3, done=4, total=4, failed=["CompilationError: no"], finished=True)


def test_jobs_that_a_dead_worker_took_along_are_failures():
    said: list[Progress] = []
    foreman = Foreman(said.append)
    foreman.expect(3)
    foreman.hear(Report(0))
    foreman.check()
    foreman.finish()
    assert said[-1].finished
    assert "2 of 3 were left undone" in said[-1].failed[0]


@dataclass
class FakeCompiler:
    """Says what it is told to."""

    progress: Progress = field(default_factory=lambda: progress())
    alive: bool = True
    waits: list[int] = field(default_factory=list)

    def poll(self, wait_s: float = 0.0) -> bool:
        return False

    def wait_ready(self, entries: int, timeout_s: float) -> bool:
        self.waits.append(entries)
        return False

    def close(self) -> None:
        self.alive = False


def progress(ready: int = 0, *, finished: bool = False, failed: tuple[str, ...] = ()) -> Progress:
    return Progress(ready=ready, done=0, total=0, failed=list(failed), finished=finished)


def test_readiness_follows_the_plan():
    table = ShapeTable(4, 64, 64)
    keys = all_keys(table)
    compiler = FakeCompiler()
    kernels = Readiness(compiler, keys)
    shape = keys[0][0]
    assert not kernels.ready(keys[0])
    compiler.progress = progress(1)
    assert kernels.ready((shape, RANDOM))
    assert kernels.ready((shape, GREEDY)), "random steps launch what greedy ones do"
    assert kernels.ready((shape, None)), "captured is the model alone"
    assert not kernels.ready(keys[1])
    strange = (StepShape(9999, 0, 3, 1), RANDOM)
    assert not kernels.ready(strange)
    kernels.wait(strange)
    kernels.wait(keys[0])
    assert compiler.waits == [], "there is nothing to wait for"
    kernels.wait(keys[2])
    assert compiler.waits == [3]
    compiler.progress = progress(1, finished=True)
    assert kernels.ready(strange)


def test_a_compiler_that_hangs_is_waited_for_once():
    keys = all_keys(ShapeTable(4, 64, 64))
    compiler = FakeCompiler()
    kernels = Readiness(compiler, keys)
    kernels.wait(keys[0])
    kernels.wait(keys[1])
    assert compiler.waits == [1]
    assert kernels.unsure


def test_without_a_compiler_everything_is_ready_and_a_lost_one_makes_unsure(caplog):
    assert Readiness().ready((StepShape(1, 1, 0, 1), None))
    assert not Readiness().unsure
    compiler = FakeCompiler()
    kernels = Readiness(compiler, all_keys(ShapeTable(4, 64, 64)))
    assert not kernels.unsure
    compiler.alive = False
    assert kernels.unsure
    compiler.progress = progress(finished=True, failed=("no such thing",))
    assert not kernels.unsure
    assert kernels.ready((StepShape(1, 1, 0, 1), None))
    assert "could not be compiled ahead: no such thing" in caplog.text


def test_what_was_missed_is_captured_next_within_bounds():
    shapes = [StepShape(n, n, 0, n) for n in (1, 2, 4)]
    queue = [(shape, GREEDY) for shape in shapes]
    captures = Captures(queue, most=4)
    prompt = (StepShape(512, 0, 9, 1), GREEDY)
    captures.missed(prompt)
    captures.missed((StepShape(4096, 0, 65, 1), GREEDY))  # too large to gain
    captures.missed((StepShape(640, 0, 11, 1), GREEDY))  # one too many
    captures.missed(queue[2])
    order = []
    while (key := captures.next(lambda key: key != queue[0])) is not None:
        captures.add(key, Graph(lambda: None, None))
        order.append(key)
    assert order == [queue[2], prompt, queue[1]]
    assert captures.left == 1
    assert captures.next(lambda key: True) == queue[0]
    captures.missed(prompt)
    assert captures.left == 1, "it has a graph"


def test_marks_outlive_what_changes_no_kernel(monkeypatch, tmp_path):
    from triton import knobs

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    order = make_order()
    assert not is_done(order)
    mark_done(order)
    assert is_done(order)
    smaller = msgspec.structs.replace(order.gpu, memory=1)
    assert is_done(msgspec.structs.replace(order, gpu=smaller, processes=7, quietly=False))
    assert not is_done(msgspec.structs.replace(order, gpu=KNOWN["a100"]))


# ------------------------------------------------------------------ processes

FAKE = """
import sys
order = sys.stdin.readline()
assert '"gpu"' in order
for line in {lines!r}:
    print(line, flush=True)
{then}
"""


def fake(lines: list[Progress], then: str) -> AheadCompiler:
    said = [msgspec.json.encode(line).decode() for line in lines]
    return AheadCompiler([sys.executable, "-c", FAKE.format(lines=said, then=then)])


def test_the_compiler_starts_beside_files_called_like_modules(tmp_path, monkeypatch):
    (tmp_path / "select.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    compiler = AheadCompiler()
    compiler.order(make_order())
    assert compiler.poll(60), "it says how far it is"
    compiler.close()


def test_the_client_hears_and_ends_its_process():
    compiler = fake([progress(1), progress(3)], "sys.stdin.read()")
    compiler.order(make_order())
    assert compiler.wait_ready(3, 20)
    assert not compiler.wait_ready(4, 0.01)
    assert compiler.alive
    compiler.close()
    assert not compiler.alive
    assert compiler._process.returncode is not None
    assert not compiler.poll()


def test_the_client_passes_over_what_is_no_progress():
    compiler = AheadCompiler([sys.executable, "-c", "import time; print('hello', flush=True); time.sleep(60)"])
    assert compiler.poll(20)
    assert compiler.alive
    assert compiler.progress == progress()
    compiler.close()


def test_the_client_outlives_a_process_that_dies(caplog):
    compiler = fake([progress(1)], "sys.exit(3)")
    compiler.order(make_order())
    assert not compiler.wait_ready(2, 20)
    assert compiler.progress.ready == 1
    assert not compiler.alive
    assert "has ended early" in caplog.text


def test_a_finished_order_ends_the_process():
    compiler = fake([progress(5, finished=True)], "")
    compiler.order(make_order())
    assert compiler.wait_ready(5, 20)
    assert not compiler.alive
    assert compiler._process.returncode == 0


def script(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    """Runs compiled, not interpreted, as real engines do."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([sys.executable, str(SCRIPT), *words], env=env, stdout=subprocess.PIPE, text=True)


def test_a_step_on_memory_asks_for_the_kernels_that_were_compiled_without(tmp_path):
    out, _ = script(tmp_path, "same").communicate(timeout=110)
    assert "the same" in out


def test_a_kernels_hash_does_not_depend_on_what_was_hashed_before(tmp_path):
    out, _ = script(tmp_path, "hash").communicate(timeout=110)
    assert "one hash each" in out


def test_workers_share_the_jobs_and_leave_kernels_in_the_cache(tmp_path):
    out, _ = script(tmp_path, "compile").communicate(timeout=110)
    reports = [line for line in out.splitlines() if line.startswith("{")]
    assert sorted(msgspec.json.decode(line, type=Report).job for line in reports) == list(range(7))
    assert not any("error" in line and "null" not in line for line in reports), out
    compiled = {path.name: path.with_suffix(".ptx").read_text() for path in tmp_path.rglob("*.cubin")}
    assert sorted(compiled) == ["begin_kernel.cubin", "end_kernel.cubin", "start_kernel.cubin"]
    begin, end, start = (compiled[name] for name in sorted(compiled))
    assert "ld.volatile.global.v4" in begin, "host memory is read past the caches, 16 bytes at once"
    assert "fence.acq_rel.gpu" in begin
    assert "ld.volatile.global" in start
    for kernel in (begin, start):
        assert "griddepcontrol" not in kernel, "whoever comes next may count on what it did"
    assert "griddepcontrol.wait" in end
    assert "%globaltimer" in begin
    assert "%globaltimer" in end
    assert len(list(tmp_path.rglob("__triton_launcher*.so"))) == 3, "their parameters differ"
    assert len(list(tmp_path.rglob("cuda_utils*.so"))) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells children of a parent's death there")
def test_workers_die_with_a_parent_that_is_killed(tmp_path):
    process = script(tmp_path, "sleep")
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker lives on"
        time.sleep(0.02)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
