"""Host memory that is pinned in the background: usable as it grows, bounded, and given back in order."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from pathlib import Path

import pytest

from firsttoken.core.errors import ConfigError
from firsttoken.core.kv_format import KVFormat
from firsttoken.kvcache.host import HostMemory, HostPool, Run, available_memory, blocks_of, host_blocks
from firsttoken.kvcache.host.memory import ALIGNMENT, SPARE_BYTES

BLOCK = 2 * ALIGNMENT
CHUNK = 4 * BLOCK
PLENTY = 1 << 40


class Pins:
    """Pins when it is let; ``fails`` from so many chunks on."""

    def __init__(self, *, free: bool = True, fails: int = 1 << 30) -> None:
        self.pinned: dict[int, int] = {}
        self.let = threading.Semaphore(1 << 20 if free else 0)
        self.fails = fails
        self.gone: list[int] = []

    def pin(self, address: int, nbytes: int) -> None:
        assert self.let.acquire(timeout=20)
        if len(self.pinned) >= self.fails:
            raise OSError("no more")
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]
        self.gone.append(address)


def opened(blocks: int, pins: Pins | None, **options) -> HostMemory:
    memory = HostMemory(blocks, BLOCK, chunk_bytes=CHUNK)
    memory.open(pins, **{"available": lambda: PLENTY, **options})
    return memory


def wait_for(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_plain_memory_is_there_at_once_and_is_taken_as_it_is_touched() -> None:
    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as text:
            return int(text.read().split()[1]) * 4096

    before = resident()
    memory = HostMemory(1 << 10, 1 << 20)  # a GiB
    memory.open()
    assert memory.num_blocks == memory.segment_blocks == 1 << 10
    assert resident() - before < 64 << 20
    memory.view(5)[:3] = b"abc"
    assert bytes(memory.view(4, 2)[1 << 20 : (1 << 20) + 4]) == b"abc\0"
    memory.close()


def test_blocks_begin_at_pages_whatever_their_size() -> None:
    memory = HostMemory(10, 5000)
    memory.open()
    assert memory.stride == 2 * ALIGNMENT
    for block in (0, 3, 9):
        view = memory.view(block)
        assert ctypes.addressof(ctypes.c_char.from_buffer(view)) == memory.address + block * memory.stride
        assert (memory.address + block * memory.stride) % ALIGNMENT == 0
        assert len(view) == memory.stride


def test_it_is_usable_as_far_as_it_is_pinned_and_grows_beside_its_user() -> None:
    pins = Pins(free=False)
    memory = opened(10, pins)
    pool = HostPool(memory)
    assert pool.num_free == 0
    assert pool.take(1) is None
    assert not memory.wait(0)
    pins.let.release()
    wait_for(lambda: memory.num_blocks)
    assert memory.num_blocks == memory.segment_blocks == 4
    assert pool.take(5) is None
    first = pool.take(3)
    assert first == [Run(0, 3)]
    memory.view(3)[:] = b"\x07" * BLOCK
    with pytest.raises(ValueError, match="host blocks 3 to 4 are not among the 4 usable"):
        memory.view(3, 2)
    pins.let.release(9)
    assert memory.wait(20)
    assert memory.num_blocks == 10
    assert memory.view(3)[0] == 7  # nothing that was given out is touched again
    # A run of four lies in the second chunk, not across the border to it.
    assert pool.take(4) == [Run(4, 4)]
    pool.check()
    assert sorted(pins.pinned.values()) == [2 * BLOCK, CHUNK, CHUNK]
    assert [address - memory.address for address in pins.pinned] == [0, CHUNK, 2 * CHUNK]
    stats = pool.stats()
    assert (stats.capacity, stats.total, stats.used, stats.free, stats.longest) == (10, 10, 7, 3, 2)
    assert stats.nbytes == 10 * BLOCK
    pool.close()
    assert not pins.pinned


def test_opening_waits_for_nothing() -> None:
    pins = Pins(free=False)
    began = time.monotonic()
    memory = opened(10, pins)
    assert time.monotonic() - began < 1
    pins.let.release(9)
    memory.close()


def test_it_grows_only_while_it_may() -> None:
    may = threading.Event()
    memory = opened(10, Pins(), may_grow=may.is_set)
    time.sleep(0.1)
    assert memory.num_blocks == 0
    may.set()
    assert memory.wait(20)
    assert memory.num_blocks == 10
    memory.close()


def test_it_stops_where_pinning_fails_and_serves_with_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    pins = Pins(fails=2)
    memory = opened(40, pins)
    assert memory.wait(20)
    assert memory.num_blocks == 8
    assert "no more" in caplog.text
    assert HostPool(memory).take(9) is None
    memory.close()
    assert not pins.pinned


def test_it_stops_before_the_system_runs_out(caplog: pytest.LogCaptureFixture) -> None:
    left = iter([PLENTY, SPARE_BYTES + CHUNK, SPARE_BYTES + CHUNK - 1])
    memory = opened(40, Pins(), available=lambda: next(left))
    assert memory.wait(20)
    assert memory.num_blocks == 8
    assert "grows no more" in caplog.text
    memory.close()


def test_closing_while_it_grows_unpins_what_was_pinned() -> None:
    pins = Pins(free=False)
    memory = opened(1000, pins)
    pins.let.release(3)
    wait_for(lambda: memory.num_blocks == 12)
    closing = threading.Thread(target=memory.close)
    closing.start()
    pins.let.release(1)  # the one that it was at
    closing.join(20)
    assert not closing.is_alive()
    assert not pins.pinned
    assert 3 <= len(pins.gone) <= 4
    assert memory.num_blocks == 0
    memory.close()


def test_a_view_outlives_the_memory() -> None:
    memory = opened(4, None)
    view = memory.view(1)
    view[:2] = b"ab"
    memory.close()
    del memory
    gc.collect()
    assert bytes(view[:2]) == b"ab"


def test_it_is_opened_once_and_before_its_blocks_are_given_out() -> None:
    memory = HostMemory(4, BLOCK)
    with pytest.raises(RuntimeError, match="must be opened"):
        HostPool(memory).take(1)
    memory.open()
    with pytest.raises(RuntimeError, match="once"):
        memory.open()
    memory.close()
    with pytest.raises(RuntimeError, match="once"):
        memory.open()
    with pytest.raises(ValueError, match="at least one block"):
        HostMemory(0, BLOCK)


def test_a_size_is_so_many_blocks_or_refused_with_what_would_do() -> None:
    kv = KVFormat(dtype="bfloat16", layers=32, kv_heads=8, head_dim=128)  # 2 MiB
    assert host_blocks(0, kv, 0) == 0
    assert host_blocks(64 << 30, kv, 100 << 30) == 32768
    assert host_blocks((4 << 20) - 1, kv, 1 << 40) == 1
    with pytest.raises(ConfigError, match="holds no KV block"):
        host_blocks(1 << 20, kv, 1 << 40)
    with pytest.raises(ConfigError, match=r"64\.0 GiB is more than 90% of the 32\.0 GiB .* lower it to 28\.8 GiB"):
        host_blocks(64 << 30, kv, 32 << 30)
    with pytest.raises(ConfigError, match="got -1"):
        host_blocks(-1, kv, 1 << 40)
    assert available_memory() > 0


def test_what_is_free_is_what_the_container_may_have(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  2000 kB\nMemFree: 10 kB\nMemAvailable:   1000 kB\nHugePages_Total:  0\n")
    assert available_memory(meminfo, tmp_path) == 1000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("500000\n")
    assert available_memory(meminfo, tmp_path) == 1000 * 1024
    (tmp_path / "memory.max").write_text("600000\n")
    assert available_memory(meminfo, tmp_path) == 100_000
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 20000\nactive_file 3000\n")
    assert available_memory(meminfo, tmp_path) == 123_000
    (tmp_path / "memory.max").write_text("1000\n")
    assert available_memory(meminfo, tmp_path) == 0
    assert available_memory(tmp_path / "none", tmp_path / "none") == 0


def test_blocks_of_runs_are_in_order() -> None:
    assert blocks_of([Run(4, 2), Run(1, 1)]) == [4, 5, 1]
