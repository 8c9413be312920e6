"""Processes that die in the middle, and two that share a folder."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from firsttoken.kvcache.disk import Outcome, ShardMeta, aligned_buffer
from tests.support.disk_shards import MIB, file_of, kv_bytes, open_store, shard

ROOT = Path(__file__).resolve().parents[2]
SIZE = 9 * MIB + 100  # three spans and a tail, then the header

# Says the number of each shard that is stored.
WRITER = """
import os, signal, sys
from pathlib import Path
from firsttoken.kvcache.disk import files
from tests.support.disk_shards import kv_buffer, open_store, shard
die_at = int(sys.argv[2])
calls = 0
real = os.pwritev
def dying(fd, buffers, offset):
    global calls
    calls += 1
    if calls == die_at:
        real(fd, [buffers[0][:4096]], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    return real(fd, buffers, offset)
if die_at:
    files.os.pwritev = dying
store = open_store(Path(sys.argv[1]), threads=4, sync=False)
assert not store.read_only
metas = [shard(number) for number in range(40)]
buffers = [kv_buffer(meta, int(sys.argv[3])) for meta in metas]
print("ready", flush=True)
handles = [store.put(meta, buffer) for meta, buffer in zip(metas, buffers)]
for number, handle in enumerate(handles):
    if handle.wait(30) == "done":
        print(number, flush=True)
print("end", flush=True)
sys.stdin.read()
"""


def start(folder: Path, die_at: int, size: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(die_at), str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def check_all(folder: Path, said: list[int], size: int) -> int:
    """Every shard that was told stored is there and right, every file is whole, nothing half is left; how many."""
    store = open_store(folder, cap_bytes=1024 * MIB)
    assert not store.read_only  # the dead hold no lock
    assert not list((folder / "firsttoken-kv").glob("*.tmp"))
    into = aligned_buffer(size)
    there = 0
    for number in range(40):
        meta: ShardMeta = shard(number)
        expected = Outcome.DONE if store.contains(meta.key) else Outcome.ABSENT
        assert expected is Outcome.DONE or number not in said
        assert store.get(meta, into).wait(30) is expected
        assert expected is Outcome.ABSENT or into == kv_bytes(meta, size)
        there += expected is Outcome.DONE
    assert store.stats().damaged == 0  # a name appears when the file is whole
    store.check()
    store.close()
    return there


@pytest.mark.parametrize("die_at", [1, 2, 3, 4, 5, 6])
def test_killed_within_a_write(tmp_path: Path, die_at: int) -> None:
    with start(tmp_path, die_at, SIZE) as writer:
        said, _ = writer.communicate(timeout=60)
    assert writer.returncode == -signal.SIGKILL
    left = list((tmp_path / "firsttoken-kv").glob("*.tmp"))
    assert left, "the test did not hit the middle of a write"
    check_all(tmp_path, [int(line) for line in said.split() if line.isdigit()], SIZE)


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_time(tmp_path: Path, seed: int) -> None:
    size = MIB
    with start(tmp_path, 0, size) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(random.Random(seed).uniform(0, 0.04))
        writer.kill()
        said = writer.stdout.read().split()
    check_all(tmp_path, [int(line) for line in said if line.isdigit()], size)


def test_another_process_reads_while_one_writes_and_writes_once_it_is_gone(tmp_path: Path) -> None:
    size = MIB // 2
    with start(tmp_path, 0, size) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        store = open_store(tmp_path)
        assert store.read_only
        into = aligned_buffer(size)
        found = 0
        for line in writer.stdout:
            if line == "end\n":
                break
            meta = shard(int(line))
            assert store.get(meta, into).wait(30) is Outcome.DONE
            assert into == kv_bytes(meta, size)
            found += 1
        assert found == 40
        assert store.put(shard(99), into).wait(30) is Outcome.READ_ONLY
        store.close()
        writer.communicate(timeout=60)
    store = open_store(tmp_path)
    assert not store.read_only
    assert store.put(shard(99), into).wait(30) is Outcome.DONE
    assert file_of(tmp_path, shard(99)).exists()
    store.close()
