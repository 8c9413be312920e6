from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.kvcache.copy import CopyEngine, check_pairs, cut, runs
from firsttoken.kvcache.host import HostMemory
from firsttoken.kvcache.torch_copy import TorchCopyEngine, open_copies

SLAB = (3, 2, 2, 16, 4)  # [layers, K and V, kv_heads, block_tokens, head_dim]


def make_pools() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "device": torch.randn(6, *SLAB, generator=generator),
        "host": torch.randn(10, *SLAB, generator=generator),
    }


def test_blocks_travel_to_another_pool_and_back() -> None:
    pools = make_pools()
    before = {name: pool.clone() for name, pool in pools.items()}
    engine: CopyEngine = TorchCopyEngine(pools)
    out = engine.submit("device", "host", [(0, 9), (4, 1), (5, 2)])
    out.wait()
    assert out.done()
    assert torch.equal(pools["host"][9], before["device"][0])
    assert torch.equal(pools["host"][1:3], before["device"][4:6])
    untouched = [0, 3, 4, 5, 6, 7, 8]
    assert torch.equal(pools["host"][untouched], before["host"][untouched])
    pools["device"].zero_()
    back = engine.submit("host", "device", [(9, 3), (2, 0)], after=[out])
    back.gate_compute()
    back.wait()
    assert torch.equal(pools["device"][3], before["device"][0])
    assert torch.equal(pools["device"][0], before["device"][5])
    assert not pools["device"][[1, 2, 4, 5]].any()


def test_blocks_are_copied_within_a_pool() -> None:
    pools = make_pools()
    before = pools["device"].clone()
    TorchCopyEngine(pools).submit("device", "device", [(0, 3), (1, 4)]).wait()
    assert torch.equal(pools["device"], before[[0, 1, 2, 0, 1, 5]])


@pytest.mark.parametrize(
    ("pairs", "complaint"),
    [
        ([(6, 0)], "source block 6"),
        ([(-1, 0)], "source block -1"),
        ([(0, 6)], "target block 6"),
        ([(0, 2), (1, 2)], "named twice"),
        ([(0, 1), (1, 2)], "both source and target"),
    ],
)
def test_wrong_pairs_are_refused_and_nothing_is_copied(pairs: list[tuple[int, int]], complaint: str) -> None:
    pools = make_pools()
    before = pools["device"].clone()
    with pytest.raises(ValueError, match=complaint):
        TorchCopyEngine(pools).submit("device", "device", pairs)
    assert torch.equal(pools["device"], before)


def test_pools_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="must be equal"):
        TorchCopyEngine({"a": torch.zeros(2, 4), "b": torch.zeros(2, 5)})
    with pytest.raises(ValueError, match="must be equal"):
        TorchCopyEngine({"a": torch.zeros(2, 4), "b": torch.zeros(2, 4, dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match="contiguous"):
        TorchCopyEngine({"a": torch.zeros(4, 4).t()[:2]})
    with pytest.raises(ValueError, match="at least one pool"):
        TorchCopyEngine({})


def test_an_unknown_pool_is_a_key_error() -> None:
    engine = TorchCopyEngine(make_pools())
    assert engine.num_blocks("host") == 10
    with pytest.raises(KeyError):
        engine.submit("disk", "host", [])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_run_beside_compute_and_in_the_order_asked_for() -> None:
    blocks, numbers = 64, 1 << 20
    device = torch.zeros(blocks, numbers, device="cuda")
    host = torch.zeros(blocks, numbers, pin_memory=True)
    engine = TorchCopyEngine({"device": device, "host": host}, max_submit_bytes=1 << 30)
    everything = [(block, block) for block in range(blocks)]
    for _ in range(20):
        device.add_(1)  # compute, then out: the copy must see all twenty
    out = engine.submit("device", "host", everything)
    out.gate_compute()
    device.zero_()  # gated: the copy must not see it
    back = engine.submit("host", "device", [(block, blocks - 1 - block) for block in range(blocks)], after=[out])
    back.gate_compute()
    device.mul_(2)
    total = device.double().sum().item()
    assert out.done()
    assert back.done()
    assert bool((host == 20).all())
    assert total == 40.0 * blocks * numbers


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_scattered_blocks_go_to_memory_that_is_pinned_meanwhile_and_come_back() -> None:
    device = torch.arange(64 * (1 << 19), device="cuda", dtype=torch.float32).view(64, 1 << 19)  # 2 MiB each
    before = device.clone()
    host = HostMemory(96, 2 << 20)
    engine = open_copies(device, host)
    assert host.wait(60)
    assert engine.num_blocks("host") == 96
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(2)).tolist()
    pairs = [(block, index + 20) for index, block in enumerate(shuffled)]  # across the borders of pinned chunks
    outs = [engine.submit("device", "host", part) for part in cut(pairs, engine.max_blocks)]
    outs[-1].gate_compute()
    device.zero_()
    for part in cut([(b, a) for a, b in pairs], engine.max_blocks):
        last = engine.submit("host", "device", part, after=outs)
    last.gate_compute()
    assert torch.equal(device, before)
    assert engine.gigabytes_per_s("host", "device") > 1
    engine.close()
    host.close()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30))
def test_runs_say_the_same_as_the_pairs(pairs: list[tuple[int, int]]) -> None:
    joined = runs(pairs)
    assert [(s + i, t + i) for s, t, count in joined for i in range(count)] == pairs
    # Maximal: no run continues the one before it.
    for (s, t, count), (s2, t2, _) in pairwise(joined):
        assert (s + count, t + count) != (s2, t2)


@given(st.lists(st.integers(1, 5), max_size=12), st.integers(1, 6), st.integers(1, 6))
def test_runs_begin_anew_where_a_segment_does(lengths: list[int], source_segment: int, target_segment: int) -> None:
    pairs = [(first * 10 + i, first * 7 + i) for first, length in enumerate(lengths) for i in range(length)]
    joined = runs(pairs, source_segment, target_segment)
    assert [(s + i, t + i) for s, t, count in joined for i in range(count)] == pairs
    for s, t, count in joined:
        assert s // source_segment == (s + count - 1) // source_segment
        assert t // target_segment == (t + count - 1) // target_segment


def test_check_pairs_allows_equal_ids_in_different_pools() -> None:
    check_pairs([(0, 1), (1, 0)], 2, 2, same_pool=False)
