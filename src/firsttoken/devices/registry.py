"""The devices by name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points

from firsttoken.core.errors import ConfigError
from firsttoken.devices.cpu import CPUDevice
from firsttoken.devices.cuda import CUDADevice
from firsttoken.devices.interface import Device

ENTRY_POINTS = "firsttoken.devices"

_REGISTERED: list[Device] = []


def register(device: Device) -> None:
    """Add a device; ``auto`` prefers it to those that come with firsttoken. Raises ValueError for a taken name."""
    if any(device.kind == known.kind for known in known_devices()):
        raise ValueError(f"device {device.kind!r} is registered already")
    _REGISTERED.append(device)


def known_devices() -> list[Device]:
    """All devices, those that ``auto`` prefers first. The CPU is the last."""
    found = [entry.load()() for entry in entry_points(group=ENTRY_POINTS)]
    return [*_REGISTERED, *found, CUDADevice(), CPUDevice()]


def begin_devices(name: str) -> list[Device]:
    """All devices; those that ``name`` may choose have begun (`Device.begin`)."""
    devices = known_devices()
    for device in devices:
        if name in ("auto", device.kind):
            device.begin()
    return devices


def choose_device(name: str, devices: Sequence[Device]) -> tuple[Device, str]:
    """The device called ``name`` ("auto": the first that can run) and why it is that one.

    Raises `ConfigError` for an unknown name and for a device that cannot run here.
    """
    if name != "auto":
        for device in devices:
            if device.kind == name:
                refusal = device.refusal()
                if refusal is not None:
                    raise ConfigError(f"device {name!r} cannot be used: {refusal}")
                return device, "asked for"
        known = ", ".join(["auto", *(device.kind for device in reversed(devices))])
        raise ConfigError(f"device must be one of {known}, got {name!r}")
    reasons: list[str] = []
    for device in devices:
        refusal = device.refusal()
        if refusal is None:
            return device, "; ".join(reasons) or "the first device that can be used here"
        reasons.append(f"not {device.kind}: {refusal}")
    raise ConfigError(f"no device can be used: {'; '.join(reasons)}")
