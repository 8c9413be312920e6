"""Faults in made-up servers are named, and by their layer; a healthy server is blamed for nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from firsttoken.diagnose.dialect import Told
from firsttoken.diagnose.evidence import gather
from firsttoken.diagnose.fit import fit, in_words
from firsttoken.diagnose.references import Reference, roofs
from firsttoken.diagnose.sample import Chunk, Sample
from firsttoken.diagnose.verdict import LAYERS, Finding, verdict
from tests.diagnose.mixtures import FAULTS, HEALTHY, Server, costs, measured, mixture

MIXTURES = 200


def findings(server: Server, seed: int = 0) -> tuple[Finding, ...]:
    return verdict(gather(measured(server, seed)), server.reference)


def test_the_costliest_fault_of_a_mixture_is_named() -> None:
    assert len(FAULTS) >= 10
    wrong = {}
    for seed in range(MIXTURES):
        server, faults = mixture(seed)
        cost = costs(server, faults, seed)
        named = findings(server, seed)[0]
        if named.cause != max(cost, key=lambda fault: cost[fault]):
            wrong[seed] = (named.cause, cost)
    assert len(wrong) <= 0.05 * MIXTURES, wrong


def test_the_mixtures_hold_every_fault_as_the_costliest() -> None:
    worst = set()
    for seed in range(MIXTURES):
        server, faults = mixture(seed)
        cost = costs(server, faults, seed)
        worst.add(max(cost, key=lambda fault: cost[fault]))
    assert worst == set(FAULTS)


@pytest.mark.parametrize("account", [False, True])
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_alone_is_named_with_what_it_costs(fault: str, account: bool) -> None:
    base = replace(HEALTHY, account=account, roofs=fault != "cache_miss")
    if fault == "no_reuse":
        base = replace(base, handshake=60.0, roofs=False)
    server = replace(base, **FAULTS[fault](150.0, random.Random(1)))
    found = findings(server)
    assert (found[0].layer, found[0].cause) == (LAYERS[fault], fault)
    cost = costs(server, (fault,), 0)[fault]
    assert found[0].saving_ms == pytest.approx(cost, rel=0.1, abs=4)
    assert found[0].advice


@pytest.mark.parametrize("account", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_server_is_blamed_for_nothing(account: bool, seed: int) -> None:
    found = findings(replace(HEALTHY, account=account), seed)
    assert [one.saving_ms for one in found] == [0]
    assert (found[0].layer, found[0].cause) == ("model", "decode")
    assert found[0].evidence.startswith("no layer takes much more than its reference")


def test_without_sweeps_there_is_a_verdict_too() -> None:
    runs = replace(measured(replace(HEALTHY, dns=80.0), 0), lengths={}, crowds={}, keep_alive=None)
    found = verdict(gather(runs), Reference())
    assert found[0].cause == "dns"


def test_one_token_answers_and_one_request_are_enough() -> None:
    runs = measured(HEALTHY, 0, requests=1)
    one = replace(runs.paced[0], chunks=runs.paced[0].chunks[:1], output_tokens=1)
    assert verdict(gather(replace(runs, paced=(one,))), Reference())


def test_tokens_in_bursts_are_a_proxys_not_the_models() -> None:
    runs = measured(HEALTHY, 0)
    bunched = []
    for one in runs.paced:
        first = one.chunks[0].at_ns
        chunks = tuple(
            replace(chunk, at_ns=first + (number // 8) * 50_000_000) for number, chunk in enumerate(one.chunks)
        )
        bunched.append(replace(one, chunks=chunks))
    found = verdict(gather(replace(runs, paced=tuple(bunched))), Reference())
    assert "buffering" in [one.cause for one in found]
    assert "jitter" not in [one.cause for one in found]


def test_roofs_are_those_of_the_data_sheet() -> None:
    one = roofs("h200", 8e9, 16)
    # 16 GB over 4.8 TB/s are 3.33 ms, of which 75 % are reached; 16 GFLOP over 989 TFLOPS are 16 us, half of it.
    assert one.decode_ms_per_token == pytest.approx(3.333 / 0.75, rel=1e-3)
    assert one.prefill_ms_per_token == pytest.approx(0.01618 / 0.5, rel=1e-3)
    assert roofs("h200", 8e9, 8, gpus=2).decode_ms_per_token == pytest.approx(3.333 / 0.75 / 4, rel=1e-3)
    with pytest.raises(KeyError):
        roofs("abacus", 8e9, 16)


def test_a_time_is_never_negative_and_has_its_error() -> None:
    """Waits that grow faster than the prompts bend the line: its intercept is below 0, and no fact."""
    lengths = {
        tokens: (sample(wait_ms=wait, prompt_tokens=tokens),) for tokens, wait in ((16, 20), (256, 40), (1024, 500))
    }
    crowds = {count: (sample(wait_ms=30 - count, prompt_tokens=16),) for count in (1, 2, 4)}
    found = fit(lengths, crowds, 0.0)
    assert found.fixed_ms is not None
    assert found.fixed_ms < 0
    told = found.report()
    assert told["fixed_ms"] == told["queue_ms_per_caller"] == 0
    assert told["errors_ms"]["fixed_ms"] > 10
    assert told["told_apart"] == {
        "fixed_ms": False,
        "prefill_ms_per_token": True,
        "decode_ms_per_token": True,
        "queue_ms_per_caller": False,
        "decode_ms_per_caller": False,
    }
    words = in_words(told)
    assert words["fixed cost of a request"].startswith("not told apart from 0 (± ")
    assert "-" not in "".join(words.values())
    two = fit({tokens: lengths[tokens] for tokens in (256, 1024)}, {}, 0.0).report()
    assert two["errors_ms"] == {"fixed_ms": None, "prefill_ms_per_token": None}
    assert in_words(two)["fixed cost of a request"] == "not told apart from 0"


def test_the_errors_are_those_of_least_squares() -> None:
    lengths = {x: (sample(wait_ms=y, prompt_tokens=x),) for x, y in ((0, 1.0), (1, 2.0), (2, 5.0), (3, 6.0))}
    found = fit(lengths, {}, 0.0)
    # y = 0.8 + 1.8 x; residuals 0.2, -0.6, 0.6, -0.2: s2 = 0.8 / 2, Sxx = 5.
    assert found.fixed_ms == pytest.approx(0.8)
    assert found.errors["prefill_ms_per_token"] == pytest.approx((0.4 / 5) ** 0.5)
    assert found.errors["fixed_ms"] == pytest.approx((0.4 * (1 / 4 + 1.5**2 / 5)) ** 0.5)


def sample(*, wait_ms: float, prompt_tokens: int) -> Sample:
    first = round(wait_ms * 1e6)
    return Sample(
        began_ns=0,
        resolved_ns=0,
        connected_ns=0,
        secured_ns=0,
        sent_ns=0,
        first_byte_ns=first,
        chunks=(Chunk(first), Chunk(first + 5_000_000)),
        ended_ns=first + 6_000_000,
        prompt_tokens=prompt_tokens,
    )


def test_a_wait_for_processors_is_told_from_jitter() -> None:
    runs = measured(replace(HEALTHY, account=True), 3)
    waiting = [replace(one, run_queue_ms=150.0) for one in runs.paced]
    [first, *others] = verdict(gather(replace(runs, paced=waiting)), HEALTHY.reference)
    assert (first.layer, first.cause, first.saving_ms) == ("service", "run_queue", 150.0)
    assert "waits 150.0 ms" in first.evidence
    assert "jitter" not in [one.cause for one in others]


@pytest.mark.parametrize(
    ("gap", "waited"),
    [({"parts_ms": {"run_queue": 7.5, "decode": 3}}, 7.5), ({"parts_ms": {"decode": 3}}, 0), (None, 0), ({"ms": 3}, 0)],
)
def test_the_engines_wait_is_read_from_the_account(gap: object, waited: float) -> None:
    told = Told()
    told.read({"timings": {"total_ms": 20.0, "worst_gap": gap}})
    assert told.run_queue_ms == waited
