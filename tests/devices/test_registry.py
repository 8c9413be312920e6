"""A device that nothing of the engine knows: registered, chosen, refused, and run."""

from __future__ import annotations

import dataclasses

import pytest

from firsttoken import LLM, SamplingParams
from firsttoken.core.errors import ConfigError
from firsttoken.devices import registry
from firsttoken.devices.cpu import CPUDevice, CPUFacts
from firsttoken.devices.interface import DeviceFacts, WeightChoice
from firsttoken.devices.registry import choose_device, known_devices, register
from firsttoken.executor.torch_executor import TorchExecutor

TINY = "random:tiny-llama"
PROMPT = {"prompt_token_ids": [5, 6, 7, 8, 9]}


class VendorDevice:
    """What a vendor's package would bring: here its chip is the CPU under another name."""

    kind = "npu"
    policy = dataclasses.replace(CPUDevice.policy, in_flight=2)

    def __init__(self, refusal: str | None = None) -> None:
        self._refusal = refusal
        self.loaded = 0

    def refusal(self) -> str | None:
        return self._refusal

    def begin(self) -> None:
        """Nothing can be begun before a driver is set up."""

    def end(self) -> None:
        """Nothing was begun."""

    def facts(self) -> DeviceFacts:
        return DeviceFacts(name="Vendor NPU 1", free_memory=1 << 30, total_memory=1 << 30, threads=1)

    def choose_weights(self, quantization: str, dtype: str) -> WeightChoice:
        if quantization not in ("auto", "none"):
            raise ConfigError(f"quantization {quantization!r} is not known to the NPU")
        return WeightChoice(quantization="none", dtype="float32", why="all that it knows")

    def load(self, config, checkpoint, close=None):
        self.loaded += 1
        return TorchExecutor.load(dataclasses.replace(config, device="cpu"), checkpoint)


@pytest.fixture
def vendor(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", [])
    device = VendorDevice()
    register(device)
    return device


def test_a_registered_device_serves_without_a_change_to_the_engine(vendor):
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    texts = []
    for name in ("npu", "cpu"):
        with LLM(TINY, device=name, quantization="none") as llm:
            texts.append(llm.generate([PROMPT], greedy)[0].outputs[0].token_ids)
            assert llm.info.device == name
    assert texts[0] == texts[1]
    assert vendor.loaded == 1


def test_auto_prefers_a_registered_device_that_can_run(vendor):
    assert choose_device("auto", known_devices())[0] is vendor
    vendor._refusal = "no chip was found"
    device, why = choose_device("auto", [vendor, CPUDevice()])
    assert device.kind == "cpu"
    assert "not npu: no chip was found" in why


def test_a_device_that_cannot_run_is_refused_with_its_reason(vendor):
    vendor._refusal = "its driver is older than 23"
    with pytest.raises(ConfigError, match="device 'npu' cannot be used: its driver is older than 23"):
        choose_device("npu", known_devices())


def test_its_own_refusals_reach_the_caller(vendor):
    with pytest.raises(ConfigError, match="quantization 'packed' is not known to the NPU"):
        LLM(TINY, device="npu", quantization="packed")


def test_an_unknown_device_is_answered_with_the_known_ones(vendor):
    with pytest.raises(ConfigError, match="device must be one of auto, cpu, cuda, npu, got 'tpu'"):
        choose_device("tpu", known_devices())


def test_a_name_is_taken_once(vendor):
    for kind in ("npu", "cuda", "cpu"):
        other = VendorDevice()
        other.kind = kind
        with pytest.raises(ValueError, match=f"device '{kind}' is registered already"):
            register(other)


def test_when_nothing_can_run_every_reason_is_told():
    devices = [VendorDevice("no chip"), VendorDevice("no driver")]
    with pytest.raises(ConfigError, match="no device can be used: not npu: no chip; not npu: no driver"):
        choose_device("auto", devices)


def test_the_cpu_keeps_what_it_was_told_of_itself():
    device = CPUDevice(CPUFacts(threads=3, fast_bf16=False, free_memory=7))
    assert (device.facts().threads, device.facts().free_memory) == (3, 7)
    assert device.choose_weights("auto", "auto").dtype == "float32"
