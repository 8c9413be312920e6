"""The driver's functions as we call them, through C's calling convention: a stand-in that copies within host memory."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from firsttoken.kvcache.copy import Piece
from firsttoken.kvcache.cuda_driver import CUDADriver, _Attributes
from tests.support.cuda_stand_in import STREAM, StandIn


def scattered() -> tuple[np.ndarray, np.ndarray, list[Piece]]:
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    places = [(0, 40, 5), (10, 0, 8), (32, 20, 16)]
    parts = [Piece(source.ctypes.data + a, target.ctypes.data + b, n) for a, b, n in places]
    return source, target, parts


def check(source: np.ndarray, target: np.ndarray) -> None:
    expected = np.zeros(64, np.uint8)
    expected[40:45], expected[0:8], expected[20:36] = source[0:5], source[10:18], source[32:48]
    assert np.array_equal(target, expected)


@pytest.mark.parametrize(("new", "old", "which"), [(True, True, "new"), (False, True, "old")])
def test_a_scattered_copy_is_one_call(new: bool, old: bool, which: str) -> None:
    stand_in = StandIn(new=new, old=old)
    driver = CUDADriver(stand_in.load)
    source, target, parts = scattered()
    driver.copy(parts, STREAM)
    check(source, target)
    assert driver.batches
    assert stand_in.batches == [(which, 3)]
    assert (driver.calls, stand_in.single) == (1, 0)
    driver.copy(parts[:1], STREAM)  # one piece needs no batch
    assert (driver.calls, stand_in.single) == (2, 1)


def test_an_old_driver_gets_a_call_for_each_piece() -> None:
    stand_in = StandIn(new=False, old=False)
    driver = CUDADriver(stand_in.load)
    source, target, parts = scattered()
    driver.copy(parts, STREAM)
    check(source, target)
    assert not driver.batches
    assert driver.calls == 3


def test_a_refused_batch_is_done_piece_by_piece_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    stand_in = StandIn(refuses=True)
    driver = CUDADriver(stand_in.load)
    source, target, parts = scattered()
    driver.copy(parts, STREAM)
    check(source, target)
    assert "CUDA error 801" in caplog.text
    assert not driver.batches
    driver.copy(parts, STREAM)
    assert driver.calls == 1 + 3 + 3


def test_a_failed_copy_is_told_with_its_code() -> None:
    _, _, parts = scattered()
    with pytest.raises(RuntimeError, match="copying 5 bytes of KV failed with CUDA error 700"):
        CUDADriver(StandIn(new=False, old=False, fails=True).load).copy(parts, STREAM)


def test_pinning_uses_the_context_of_torch_and_keeps_none() -> None:
    stand_in = StandIn()
    driver = CUDADriver(stand_in.load)
    driver.pin(3, 1 << 46, 1 << 26)
    assert stand_in.pinned == {1 << 46: (1 << 26, 1)}
    assert stand_in.contexts == ["retain 3", "set 4099", "release 3"]
    driver.unpin(3, 1 << 46)
    assert not stand_in.pinned
    with pytest.raises(OSError, match="CUDA error 713"):
        driver.unpin(3, 1 << 46)


def test_what_cannot_be_pinned_is_told_with_its_code() -> None:
    with pytest.raises(OSError, match="pinning 4096 bytes of host memory failed with CUDA error 2"):
        CUDADriver(StandIn(fails=True).load).pin(0, 4096, 4096)


def test_the_attributes_are_as_long_as_the_driver_reads() -> None:
    assert ctypes.sizeof(_Attributes) == 24
