"""What torch's libraries keep prepared on the CPU is bounded, unless the operator has said otherwise."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from firsttoken.devices.cpu import PREPARED, CPUDevice, CPUFacts
from firsttoken.executor.torch_executor import TorchExecutor

NAMES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def test_the_bound_is_set_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMES[0], "7")
    # Set first, so that what is set here is taken back in the end.
    monkeypatch.setenv(NAMES[1], "")
    del os.environ[NAMES[1]]
    seen = []
    monkeypatch.setattr(
        TorchExecutor, "load", lambda config, checkpoint: seen.append({name: os.environ[name] for name in NAMES})
    )
    CPUDevice(CPUFacts(1, False, 1 << 30)).load(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    assert seen == [{NAMES[0]: "7", NAMES[1]: str(PREPARED)}]
