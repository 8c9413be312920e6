"""The arithmetic of the figures, against values made by hand."""

from __future__ import annotations

import itertools
import random

import pytest

from firsttoken.bench.arrivals import Arrival, Mix, endless, poisson
from firsttoken.bench.figures import latency_figures, within_targets
from firsttoken.bench.requests import Timed, random_prompt
from firsttoken.bench.roof import kv_bytes, read_roof_gb_s, weight_bytes
from firsttoken.bench.session import HostTime
from firsttoken.checkpoint.shapes import open_random
from firsttoken.transport.messages import EngineInfo, EngineStats

MS = 1_000_000


def timed(sent: float, *arrivals: tuple[float, int], output: int | None = None, error: str | None = None) -> Timed:
    """Times in ms."""
    total = sum(count for _, count in arrivals)
    return Timed(
        8, total if output is None else output, int(sent * MS), [(int(at * MS), n) for at, n in arrivals], error
    )


def test_one_request() -> None:
    one = timed(10, (30, 1), (34, 1), (44, 2))
    assert (one.ttft_ms, one.e2e_ms, one.tokens) == (20, 34, 4)
    # The third and the fourth token came together: the gap before them, then none.
    assert one.gaps_ms == [4, 10, 0]
    assert one.tpot_ms == pytest.approx(14 / 3)
    assert one.ok


def test_tokens_that_come_with_the_first_have_no_gap_before_them() -> None:
    assert timed(0, (5, 3), (6, 1)).gaps_ms == [0, 0, 1]


def test_a_single_token_has_a_first_token_and_no_gap() -> None:
    one = timed(0, (5, 1))
    assert one.tpot_ms is None
    assert one.gaps_ms == []
    assert latency_figures([one])["tpot_ms"] == {}
    assert latency_figures([one])["ttft_ms"]["p50"] == 5


def test_a_request_that_ended_early_is_not_ok() -> None:
    assert not timed(0, (5, 1), output=2).ok
    assert not timed(0, (5, 1), error="x").ok


def test_figures_take_tpot_by_request_and_itl_by_gap() -> None:
    slow, fast = timed(0, (10, 1), (20, 1), (30, 1)), timed(0, (20, 1), (22, 1))
    figures = latency_figures([slow, fast])
    assert figures["tpot_ms"]["p50"] == 6  # of 10 and 2
    assert figures["itl_ms"]["p50"] == 10  # of 10, 10 and 2
    assert figures["ttft_ms"]["mean"] == 15
    assert figures["e2e_ms"]["max"] == 30


@pytest.mark.parametrize(
    ("ttft", "itl", "good"), [(None, None, True), (10, None, True), (9.9, None, False), (10, 4, False), (None, 5, True)]
)
def test_targets_hold_for_the_first_token_and_the_requests_own_p99(
    ttft: float | None, itl: float | None, good: bool
) -> None:
    assert within_targets(timed(0, (10, 1), (13, 1), (18, 1)), ttft, itl) is good


def test_a_failed_request_is_never_good() -> None:
    assert not within_targets(timed(0, (1, 1), error="x"), None, None)


# ---------------------------------------------------------------- arrivals


def test_poisson_draws_in_the_documented_order() -> None:
    mix = Mix((64, 256, 512, 2048), (16, 64, 128))
    rng = random.Random(1)
    at, expected = 0.0, []
    for _ in range(240):
        at += rng.expovariate(20)
        expected.append(Arrival(at, rng.choice([64, 256, 512, 2048]), rng.choice([16, 64, 128])))
    assert poisson(20, 12, mix, 1) == expected


def test_poisson_has_about_its_rate() -> None:
    arrivals = poisson(50, 100, Mix((1,), (1,)), 3)
    assert len(arrivals) == 5000
    assert arrivals[-1].at_s == pytest.approx(100, rel=0.05)


def test_endless_repeats_with_its_seed() -> None:
    mix = Mix((1, 2, 3), (4, 5))
    first, again, other = (list(itertools.islice(endless(mix, seed), 50)) for seed in (7, 7, 8))
    assert first == again != other


def test_mix_reads_what_it_writes() -> None:
    text = "64,256,512,2048:16,64,128"
    assert str(Mix.parse(text)) == text


@pytest.mark.parametrize("text", ["", "64", "64:", ":16", "a:b", "1:2:3", "64,0:16", "64:-1", "1.5:2"])
def test_a_wrong_mix_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a mix|below 1"):
        Mix.parse(text)


def test_prompts_are_in_the_vocabulary_and_share_no_beginning() -> None:
    rng = random.Random(0)
    prompts = [random_prompt(rng, 32, 307) for _ in range(50)]
    assert all(max(prompt) < 307 and len(prompt) == 32 for prompt in prompts)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 50


# ---------------------------------------------------------------- the roof


def test_decode_reads_all_weights_but_an_untied_embedding() -> None:
    # What the shapes' published models have: 8.03 B parameters, of them 0.525 B in the embedding table.
    untied = weight_bytes(open_random("random:llama-3.1-8b"), "none", "bfloat16")
    assert untied == pytest.approx(2 * (8.03e9 - 128256 * 4096), rel=1e-3)
    tied = weight_bytes(open_random("random:llama-3.2-1b"), "none", "bfloat16")
    assert tied == pytest.approx(2 * 1.236e9, rel=1e-3)


def test_unknown_forms_have_no_roof() -> None:
    assert weight_bytes(open_random("random:tiny-llama"), "int3", "bfloat16") is None
    assert read_roof_gb_s("a computer") is None
    assert read_roof_gb_s("NVIDIA H200") == 4520


def test_kv_bytes_are_those_of_the_mean_context() -> None:
    info = EngineInfo(
        model="m",
        max_model_len=64,
        vocab_size=8,
        max_num_seqs=4,
        kv_blocks=8,
        block_tokens=16,
        bytes_per_block=16 * 100,
        device="cpu",
        dtype="float32",
        quantization="none",
        kv_dtype="float32",
    )
    # Three outputs: two decode steps, which read 10 + 1 and 10 + 2 tokens.
    assert kv_bytes(info, 2, 10, 3) == 2 * 11.5 * 100


def test_host_time_adds_up() -> None:
    one = HostTime.between(EngineStats(steps=5, host_ns=1000), EngineStats(steps=15, host_ns=21_000))
    assert one == HostTime(10, 20_000)
    assert (one + HostTime(10, 0)).us_per_step == 1
    assert HostTime().us_per_step is None
