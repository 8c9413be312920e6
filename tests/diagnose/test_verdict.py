"""Faults in made-up servers are named, and by their layer; a healthy server is blamed for nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from firsttoken.diagnose.evidence import gather
from firsttoken.diagnose.references import Reference, roofs
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
