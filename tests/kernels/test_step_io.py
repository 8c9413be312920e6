"""The kernels that bring starts and a step's inputs to the device and its results back, against torch."""

from __future__ import annotations

import pytest
import torch

from firsttoken.kernels.step_io import HEAD_WORDS, PLACE, begin_step, end_step, new_state, reference, start_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pinned(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, pin_memory=DEVICE.type == "cuda")


def drained() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize(("words", "patches", "live"), [(16, 1, 0), (96, 1, 1), (4096, 5, 3), (4112, 300, 299)])
def test_inputs_arrive_and_name_blocks(words, patches, live):
    """Words around the size of a program's piece, patches around its lanes; what is not the place's stays as it is."""
    generator = torch.Generator().manual_seed(words)
    ring = pinned(3, 4160)
    ring.random_(-1000, 1000, generator=generator)
    at = max(0, words // 2 // 16 * 16 - 3 * patches // 32 * 16)
    named = torch.full((patches, 3), -1, dtype=torch.int32)
    for number, index in enumerate(torch.randperm(patches, generator=generator)[:live].tolist()):
        named[index] = torch.tensor([number % 7, number // 7, 1000 + number])
    ring[2, at : at + 3 * patches] = named.ravel()
    found = []
    for begin in (begin_step, reference.begin_step):
        buffer = torch.full((4200,), 7, dtype=torch.int32, device=DEVICE)
        tables = torch.zeros((7, 50), dtype=torch.int32, device=DEVICE)
        state = new_state(DEVICE)
        state[PLACE] = 2
        begin(buffer[:words], ring, state, buffer[at : at + 3 * patches].view(-1, 3), tables)
        drained()
        assert int(state[PLACE]) == 2, "the step is not over"
        found.append((buffer.cpu(), tables.cpu()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert int((found[0][1] > 0).sum()) == live


@pytest.mark.parametrize(
    ("at", "starts"),
    [
        (0, [(3, 1, 1)]),
        (5, [(0, 1023, 64), (4, 1025, 65), (2, 7, 0)]),
        (16, [(4, 9000, 563), (-1, 0, 0), (1, 0, 0)]),  # more than all programs take at once, padding, nothing known
    ],
)
def test_starts_reach_their_rows_and_no_other(at, starts):
    """``starts`` are (slot, tokens, blocks). Around the words that a program takes at once."""
    words = at + sum(HEAD_WORDS + known + held + 6 for _, known, held in starts)
    staging = pinned(words)
    staging.random_(1, 1000, generator=torch.Generator().manual_seed(at))
    first = HEAD_WORDS * len(starts)
    for number, (slot, known, held) in enumerate(starts):
        head = at + HEAD_WORDS * number
        staging[head : head + HEAD_WORDS] = torch.tensor([slot, first, known, held])
        first += known + held + 6
    found = []
    for start in (start_rows, reference.start_rows):
        rows = [torch.zeros(5, width, dtype=torch.int32, device=DEVICE) for width in (9001, 563, 6)]
        start(*rows, staging, at, len(starts), max(known for _, known, _ in starts))
        drained()
        found.append([row.cpu() for row in rows])
    for mine, wanted in zip(*found, strict=True):
        assert torch.equal(mine, wanted)
    live = {slot: (known, held, 6) for slot, known, held in starts if slot >= 0}
    for which, mine in enumerate(found[0]):
        counts = [live[slot][which] if slot in live else 0 for slot in range(5)]
        assert (mine > 0).sum(1).tolist() == counts


@pytest.mark.parametrize("words", [32, 2048, 2064])
def test_results_go_to_one_place_after_the_other(words):
    """Round the ring and on; shorter results leave the rest of a place as it is."""
    kinds = []
    for end in (end_step, reference.end_step):
        ring, times, state = pinned(3, 2112), pinned(3, 2, dtype=torch.int64), new_state(DEVICE)
        for step in range(4):
            outputs = torch.arange(step, step + words, dtype=torch.int32, device=DEVICE)
            end(outputs, ring, times, state, pdl=False)
            drained()
            assert int(state[PLACE]) == (step + 1) % 3
        kinds.append(ring.clone())
    assert torch.equal(kinds[0], kinds[1])
    assert ring[:, 0].tolist() == [3, 1, 2]
    assert not ring[:, words:].any()


def test_a_step_knows_its_time_where_there_is_a_clock():
    ring, times, state = pinned(2, 16), torch.full((2, 2), 5, dtype=torch.int64), new_state(DEVICE)
    times = times.pin_memory() if DEVICE.type == "cuda" else times
    buffer = torch.full((16,), -1, dtype=torch.int32, device=DEVICE)
    tables = torch.zeros((1, 1), dtype=torch.int32, device=DEVICE)
    begin_step(buffer, ring, state, buffer[:3].view(1, 3), tables)
    end_step(buffer, ring, times, state, pdl=False)
    drained()
    began, ended = times[0].tolist()
    assert (0 < began <= ended < began + 10**9) if DEVICE.type == "cuda" else (began, ended) == (0, 0)
    assert times[1].tolist() == [5, 5]
