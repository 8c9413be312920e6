"""With host memory and files below the cache, tokens are those without: after eviction, restart, damage, a full disk,
an end in the middle of a write, and with another model's files in the folder. Token by token, in unpacked float32."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from firsttoken.core.sampling_params import SamplingParams
from firsttoken.kvcache.disk import transfers
from firsttoken.kvcache.disk.store import DiskStore
from firsttoken.kvcache.tiers import cost
from tests.end_to_end.test_sameness import Engine

TINY = "random:tiny-llama"
BLOCK = 16
PARAMS = SamplingParams(temperature=0, max_tokens=6)
Start = Callable[..., Engine]


@pytest.fixture(autouse=True)
def always_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model as small as these is computed sooner than restored, and sooner than all files have been found."""
    monkeypatch.setattr(cost, "WORTH", 1e9)
    make = DiskStore.__init__

    def make_scanned(self: DiskStore, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        assert self.scanned(30)

    monkeypatch.setattr(DiskStore, "__init__", make_scanned)


@pytest.fixture
def start() -> Iterator[Start]:
    engines: list[Engine] = []

    def make(model: str = TINY, **args: Any) -> Engine:
        engines.append(Engine(model, **args))
        return engines[-1]

    yield make
    for engine in engines:
        engine.stop()


@pytest.fixture
def sizes(start: Start) -> Callable[[int], int]:
    """Bytes of so many blocks."""
    each = start().info.bytes_per_block
    return lambda blocks: blocks * each


def make_prompts(count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(256) for _ in range(tokens)] for _ in range(count)]


def from_tiers(deltas: list[Any]) -> tuple[int, int]:
    return sum(delta.cached_host for delta in deltas), sum(delta.cached_disk for delta in deltas)


def assert_idle(engine: Engine) -> None:
    """Soon: blocks that are being copied are in use."""
    until = time.monotonic() + 10
    while (engine.stats.running, engine.stats.waiting, engine.stats.kv_used) != (0, 0, 0):
        assert time.monotonic() < until, f"{engine.stats.kv_used} KV blocks are in use without a request"
        time.sleep(0.05)


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def fill(start: Start, sizes: Callable[[int], int], folder: Path, prompts: list[list[int]], **args: Any) -> list[Any]:
    """Have the KV of ``prompts`` written by an engine that then ends; what it answered."""
    engine = start(kv_host_memory=sizes(64), kv_disk=str(folder), **args)
    tokens, _ = engine.run(prompts, PARAMS)
    engine.stop()
    return tokens


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("disk", [False, True])
def test_twenty_sessions_in_tiny_pools_get_what_they_get_alone(
    start: Start, sizes: Callable[[int], int], tmp_path: Path, depth: int, disk: bool
) -> None:
    """Each session begins with words of its own; all ask at once, five times, each time with more behind."""
    tiers = {"kv_host_memory": sizes(150), "kv_disk": str(tmp_path) if disk else None}
    plain = start(prefix_caching=False)
    tight = start(kv_memory=sizes(40), max_model_len=320, max_num_seqs=6, in_flight=depth, **tiers)
    sessions = make_prompts(20, 40)
    host = found = 0
    for round_ in range(5):
        expected, _ = plain.run(sessions, PARAMS)
        got, last = tight.run(sessions, PARAMS)
        assert got == expected, f"round {round_}"
        assert len({tuple(tokens) for tokens in got}) > 15, "the sessions cannot be told apart"
        for delta, session in zip(last, sessions, strict=True):
            assert delta.finish_reason == "length"
            assert 0 <= delta.cached_host + delta.cached_disk <= delta.cached_tokens < len(session)
        host, found = host + from_tiers(last)[0], found + sum(delta.cached_tokens for delta in last)
        more = make_prompts(20, 25, seed=round_ + 1)
        sessions = [a + b + c for a, b, c in zip(sessions, expected, more, strict=True)]
    assert host > 20 * 40, "hardly anything came from host memory"
    assert_idle(tight)


def test_a_batch_window_changes_nothing_for_prompts_that_are_restored(
    start: Start, sizes: Callable[[int], int], tmp_path: Path
) -> None:
    """Who is held has its files read meanwhile, and who restores is not held once more."""
    prompts = make_prompts(6, 150)
    expected, _ = start(prefix_caching=False).run(prompts, PARAMS)
    tiers = {"kv_host_memory": sizes(40), "kv_disk": str(tmp_path)}
    held = start(kv_memory=sizes(24), max_model_len=200, max_num_seqs=2, batch_window="60ms", **tiers)
    host = disk = 0
    for round_ in range(3):
        got, last = held.run(prompts, PARAMS)
        assert got == expected, f"round {round_}"
        host, disk = host + from_tiers(last)[0], disk + from_tiers(last)[1]
    assert host > 0, "nothing came from host memory"
    assert disk > 0, "nothing came from files"
    assert_idle(held)


@pytest.mark.parametrize("model", ["random:tiny-llama", "random:tiny-qwen3"])
def test_after_a_restart_prompts_come_from_files_and_answers_are_the_same(
    start: Start, sizes: Callable[[int], int], tmp_path: Path, model: str
) -> None:
    prompts = make_prompts(4, 150)
    host = start(model).info.bytes_per_block * 128
    first = start(model, kv_host_memory=host, kv_disk=str(tmp_path))
    expected, _ = first.run(prompts, PARAMS)
    first.stop()
    again = start(model, kv_host_memory=host, kv_disk=str(tmp_path))
    got, last = again.run(prompts, PARAMS)
    assert got == expected
    assert all(delta.cached_host == 0 and delta.cached_disk <= 144 for delta in last)
    # What a busy machine reads late is computed instead.
    assert sum(delta.cached_disk for delta in last) >= 2 * 144


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_prompts_with_a_common_beginning_come_from_files_in_any_order(
    start: Start, sizes: Callable[[int], int], tmp_path: Path, order: tuple[int, ...]
) -> None:
    """The first one's file reaches beyond where the others leave it."""
    common = make_prompts(1, 20, seed=5)[0]
    prompts = [[*common, *rest] for rest in make_prompts(3, 130, seed=6)]
    engine = start(kv_host_memory=sizes(64), kv_disk=str(tmp_path))
    expected = [engine.run([prompt], PARAMS)[0][0] for prompt in prompts]
    engine.stop()
    engine = start(kv_host_memory=sizes(64), kv_disk=str(tmp_path))
    for place, number in enumerate(order):
        [tokens], [delta] = engine.run([prompts[number]], PARAMS)
        assert tokens == expected[number]
        assert delta.cached_tokens == 144, "all but the last block"
        assert delta.cached_disk >= 144 - BLOCK * (place > 0)
        assert delta.miss is None, "nothing is missing that a tier had"


def test_files_of_another_model_or_another_way_to_compute_it_are_not_used(
    start: Start, sizes: Callable[[int], int], tmp_path: Path
) -> None:
    prompts = make_prompts(3, 100)
    fill(start, sizes, tmp_path, prompts)
    mine = set(files_of(tmp_path))
    assert mine
    for others in ({"model": "random:tiny-qwen2"}, {"dtype": "bfloat16"}):
        expected, _ = start(**others).run(prompts, PARAMS)
        other = start(kv_host_memory=sizes(64), kv_disk=str(tmp_path), **others)
        got, last = other.run(prompts, PARAMS)
        other.stop()
        assert got == expected
        assert from_tiers(last) == (0, 0), "KV of another model"
        assert set(files_of(tmp_path)) > mine, "each has its own files beside the others'"
        mine = set(files_of(tmp_path))


def flip(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 16
    return bytes(changed)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a bit of the header": lambda data: flip(data, 20),
    "a bit of the tokens": lambda data: flip(data, 200),
    "a bit of the KV": lambda data: flip(data, len(data) - 1000),
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "longer": lambda data: data + data[:4096],
    "other content": lambda data: os.urandom(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
@pytest.mark.parametrize("running", [False, True], ids=["between runs", "while it runs"])
def test_a_damaged_file_is_a_miss(
    start: Start,
    sizes: Callable[[int], int],
    tmp_path: Path,
    damage: Callable[[bytes], bytes],
    running: bool,
) -> None:
    [prompt] = make_prompts(1, 481)
    [expected] = fill(start, sizes, tmp_path, [prompt])
    assert len(files_of(tmp_path)) >= 2
    engine = start(kv_host_memory=sizes(80), kv_disk=str(tmp_path)) if running else None
    for path in files_of(tmp_path):
        path.write_bytes(damage(path.read_bytes()))
    engine = engine or start(kv_host_memory=sizes(80), kv_disk=str(tmp_path))
    got, last = engine.run([prompt], PARAMS)
    assert got == [expected]
    assert (last[0].finish_reason, last[0].cached_tokens) == ("length", 0)


def test_what_lies_before_a_damaged_file_is_used(start: Start, sizes: Callable[[int], int], tmp_path: Path) -> None:
    [prompt] = make_prompts(1, 481)
    [expected] = fill(start, sizes, tmp_path, [prompt])
    engine = start(kv_host_memory=sizes(80), kv_disk=str(tmp_path))
    starts = sorted(files_of(tmp_path), key=lambda path: prompt_place(path, prompt))
    starts[1].write_bytes(flip(starts[1].read_bytes(), starts[1].stat().st_size - 1000))
    place = prompt_place(starts[1], prompt)
    got, last = engine.run([prompt], PARAMS)
    assert got == [expected]
    assert last[0].cached_disk == place > 0


def prompt_place(path: Path, prompt: list[int]) -> int:
    """Where in the prompt the tokens lie that a file's header has."""
    data = path.read_bytes()
    return min(at for at in range(0, len(prompt), BLOCK) if array("I", prompt[at : at + BLOCK]).tobytes() in data)


def test_a_full_disk_is_nobodys_error(
    start: Start, sizes: Callable[[int], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> int:
        raise OSError(28, "No space left on device")

    prompts = make_prompts(6, 150)
    expected, _ = start(prefix_caching=False).run(prompts, PARAMS)
    monkeypatch.setattr(transfers, "write_file", full)
    engine = start(kv_host_memory=sizes(64), kv_disk=str(tmp_path), kv_memory=sizes(30), max_model_len=200)
    for _ in range(2):
        got, last = engine.run(prompts, PARAMS)
        assert got == expected
        assert {delta.finish_reason for delta in last} == {"length"}
    assert not files_of(tmp_path)


def test_a_disk_that_hangs_delays_a_prompt_once_and_then_is_left_alone(
    start: Start, sizes: Callable[[int], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts(3, 150)
    expected = fill(start, sizes, tmp_path, prompts)
    engine = start(kv_host_memory=sizes(64), kv_disk=str(tmp_path))
    hangs = {"on": True}
    real = transfers.read_file

    def hanging(*arguments: Any, **options: Any) -> Any:
        while hangs["on"]:
            time.sleep(0.01)
        return real(*arguments, **options)

    monkeypatch.setattr(transfers, "read_file", hanging)
    try:
        began = time.monotonic()
        first, last = engine.run(prompts[:1], PARAMS)
        others, more = engine.run(prompts[1:], PARAMS)
        assert time.monotonic() - began < 5
        assert first + others == expected
        assert from_tiers(last + more) == (0, 0)
    finally:
        hangs["on"] = False
    engine.run(make_prompts(1, 20, seed=5), PARAMS)
    assert_idle(engine)


KILLED = """
import sys, time
from tests.end_to_end.test_sameness import Engine
from tests.end_to_end.test_tiers_sameness import PARAMS, make_prompts
engine = Engine("random:tiny-llama", kv_host_memory=int(sys.argv[2]), kv_disk=sys.argv[1])
engine.run(make_prompts(40, 150), PARAMS)
time.sleep(60)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_wrong(
    start: Start, sizes: Callable[[int], int], tmp_path: Path
) -> None:
    prompts = make_prompts(40, 150)
    expected, _ = start(prefix_caching=False).run(prompts, PARAMS)
    found = []
    for number in range(3):
        before = set(files_of(tmp_path))
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), str(sizes(500))])
        try:
            while not set(files_of(tmp_path)) - before and process.poll() is None:
                time.sleep(0.001)
            time.sleep(0.02 * number)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        engine = start(kv_host_memory=sizes(500), kv_disk=str(tmp_path))
        got, last = engine.run(prompts, PARAMS)
        assert got == expected
        found.append(from_tiers(last)[1])
        engine.stop()
        for path in files_of(tmp_path)[::2]:
            path.unlink()
    # Of one killed in its first file nothing is whole, and where the file of a beginning is gone the rest is of no use.
    assert max(found) > 0
