"""Stateless random numbers: reproducible, uniform, and apart for different seeds and positions."""

import subprocess
import sys

import numpy as np
import pytest

from firsttoken.core.random import derive_seed, mix64, random_word, uniform


def test_mix64_is_the_finaliser_of_splitmix64():
    # The published first output of SplitMix64 from state 0 is the finaliser of its increment.
    assert mix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


def test_same_in_another_process():
    code = "from firsttoken.core.random import *; print(uniform(7, 3).hex(), derive_seed(-5, 2))"
    outputs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert outputs == {f"{uniform(7, 3).hex()} {derive_seed(-5, 2)}\n"}


def test_uniform_over_positions_and_over_seeds():
    for draws in (
        [uniform(42, position) for position in range(20_000)],
        [uniform(seed, 5) for seed in range(20_000)],
        [uniform(derive_seed(1, index), 0) for index in range(20_000)],
    ):
        values = np.array(draws)
        assert values.min() >= 0
        assert values.max() < 1
        counts = np.histogram(values, bins=100, range=(0, 1))[0]
        chi2 = float(((counts - 200) ** 2 / 200).sum())
        assert 50 < chi2 < 160  # 99 degrees of freedom: outside with probability about 1e-4
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.03


def test_neighbouring_seeds_do_not_share_a_shifted_sequence():
    first = {random_word(1, position) for position in range(5000)}
    second = {random_word(2, position) for position in range(5000)}
    assert not first & second


def test_children_get_different_seeds():
    seeds = {derive_seed(seed, index) for seed in (-(2**63), -1, 0, 1, 2**63 - 1) for index in range(128)}
    assert len(seeds) == 5 * 128
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_negative_index_is_refused():
    with pytest.raises(ValueError, match="-1"):
        derive_seed(0, -1)
