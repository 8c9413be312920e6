from __future__ import annotations

import pytest

from firsttoken.cli.main import main
from firsttoken.devices.cuda import CUDADevice


def test_without_a_gpu_one_must_be_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(CUDADevice, "refusal", lambda _: "torch finds no CUDA device; use --device cpu, or buy one")
    assert main(["warm", "random:tiny-llama"]) == 2
    said = capsys.readouterr().err
    assert "no GPU here to compile for (torch finds no CUDA device): name one by --gpu" in said
    assert "--device" not in said, "warm has no such option"
