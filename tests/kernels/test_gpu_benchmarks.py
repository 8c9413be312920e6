"""What the GPU benchmarks check kernels with can be made: they themselves run only where there is a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from benchmarks.gpu.attention_checks import problems


def test_every_attention_problem_can_be_made() -> None:
    names = [name for name, _ in problems(False, "meta")]
    assert {name.split()[0] for name in names} == {"decode", "write_kv", "prefill"}
