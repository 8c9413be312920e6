"""The driver is asked for a context once, and gets it back once, whatever it answers."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from firsttoken.devices import cuda
from firsttoken.devices.early_context import DRIVER, EarlyContext


class FakeDriver:
    """``failing`` names the call that fails; ``calls`` are those made."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.calls: list[str] = []

    def __getattr__(self, name: str):
        def call(*_: object) -> int:
            self.calls.append(name)
            return 100 if name == self.failing else 0

        return call


MADE = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


def test_a_context_is_made_and_given_up_once():
    driver = FakeDriver()
    loaded = []
    context = EarlyContext(lambda name: loaded.append(name) or driver)
    context.close()
    context.close()
    assert loaded == [DRIVER]
    assert driver.calls == [*MADE, "cuDevicePrimaryCtxRelease_v2"]


@pytest.mark.parametrize("failing", MADE)
def test_what_was_not_made_is_not_given_up(failing):
    driver = FakeDriver(failing)
    EarlyContext(lambda name: driver).close()
    assert driver.calls == MADE[: MADE.index(failing) + 1]


def test_a_machine_without_a_driver_is_left_to_torch():
    def load(name: str):
        raise OSError(f"{name}: cannot open shared object file")

    EarlyContext(load).close()
    old = SimpleNamespace(cuInit=lambda flags: 0)
    EarlyContext(lambda name: old).close()


def test_making_it_holds_nobody_up():
    may_go = threading.Event()
    driver = FakeDriver()
    driver.cuInit = lambda flags: int(not may_go.wait(20))
    context = EarlyContext(lambda name: driver)  # returns although the driver does not
    may_go.set()
    context.close()
    assert driver.calls == ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"]


def test_a_gpu_begins_where_there_is_a_driver_and_ends_what_it_began(monkeypatch, tmp_path: Path):
    closed: list[str] = []
    read = threading.Event()

    def fake(name: str):
        return lambda: SimpleNamespace(close=lambda: closed.append(name))

    monkeypatch.setattr(cuda, "AheadCompiler", fake("compiler"))
    monkeypatch.setattr(cuda, "EarlyContext", fake("context"))
    monkeypatch.setattr(cuda, "_read_triton", read.set)
    control = tmp_path / "nvidiactl"
    monkeypatch.setattr(cuda, "CONTROL_DEVICE", control)
    device = cuda.CUDADevice()
    device.begin()
    device.end()
    assert not closed
    control.touch()
    device.begin()
    assert read.wait(20)
    device.end()
    device.end()
    assert closed == ["compiler", "context"]
