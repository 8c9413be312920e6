"""Why a GPU is not used, said before anything is set up."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from firsttoken.core.errors import ConfigError
from firsttoken.devices.cpu import CPUDevice
from firsttoken.devices.cuda import CUDADevice
from firsttoken.devices.registry import choose_device


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU of some capability, as far as refusals ask."""

    def of(capability: tuple[int, int]) -> CUDADevice:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old GPU")
        return CUDADevice()

    return of


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9)])
def test_a_gpu_that_the_kernels_cannot_run_on_is_refused_with_its_capability(gpu, capability):
    device = gpu(capability)
    words = f"Old GPU has compute capability {capability[0]}.{capability[1]}, the kernels need 9.0 or newer"
    with pytest.raises(ConfigError, match=words):
        choose_device("cuda", [device, CPUDevice()])
    chosen, why = choose_device("auto", [device, CPUDevice()])
    assert chosen.kind == "cpu"
    assert words in why


def test_a_new_enough_gpu_is_taken(gpu):
    assert choose_device("auto", [gpu((9, 0)), CPUDevice()])[0].kind == "cuda"


def test_a_missing_triton_is_named(gpu, monkeypatch):
    device = gpu((9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install triton"):
        choose_device("cuda", [device])
