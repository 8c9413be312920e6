"""The sampling kernels, each against its float64 reference: maxima, thresholds, noise, draws."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from firsttoken.core.sampling_params import SamplingParams
from firsttoken.kernels.sample import reference, state, triton_search
from firsttoken.kernels.sample.state import Outputs, Scratch, Step
from firsttoken.kernels.sample.triton import draw, finish, gumbel, partials, row_key
from firsttoken.sampling.device.params import state_row

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GREEDY = SamplingParams(temperature=0)
SEED, POSITION = 2**40 + 17, 9


def a_step(logits, params, *, positions=None, best=None):
    """One row a slot, and slots in reverse so that they differ from the rows."""
    rows, vocab = logits.shape
    slots = torch.arange(rows - 1, -1, -1, dtype=torch.int32)
    words = np.stack([state_row(params[int(slot)], SEED + int(slot), 4, 0, vocab) for slot in range(rows)])
    scratch = Scratch.allocate(rows, vocab, DEVICE)
    values, indices = (scratch.values, scratch.indices) if best is None else best
    positions = torch.full((rows,), POSITION, dtype=torch.int32) if positions is None else positions
    return Step(
        logits=logits.to(DEVICE),
        slots=slots.to(DEVICE),
        positions=positions.to(DEVICE),
        table=torch.full((rows, 16), -7, dtype=torch.int32, device=DEVICE),
        state=torch.from_numpy(words).to(DEVICE),
        values=values,
        indices=indices,
        scratch=scratch,
        out=Outputs.allocate(rows, DEVICE),
    )


def cuts(step):
    """Which tokens [R, V] the thresholds that were found keep."""
    logits, ids = step.logits.cpu(), torch.arange(step.vocab_size)
    value, last = step.scratch.cut_value.cpu()[:, None], step.scratch.cut_id.cpu()[:, None]
    return (logits > value) | ((logits == value) & (ids <= last))


def check_kept(rows, params):
    """Run the search on each row of logits with its parameters, and compare what is kept (before min_p) exactly."""
    step = a_step(torch.stack(rows), params[::-1])
    partials(step)
    finish(step)
    triton_search.search(step)
    for row, logits, param, found in zip(range(len(rows)), rows, params, cuts(step), strict=True):
        expected = reference.kept(logits, param)
        found &= (logits > -math.inf) if param.min_p == 0 else reference.kept(logits, param.replace(top_k=0, top_p=1.0))
        differs = torch.nonzero(found != expected).flatten().tolist()
        assert not differs, f"row {row}, {param}: {int(found.sum())} kept for {int(expected.sum())}, {differs[:5]}"
    assert int(step.scratch.arrived.abs().sum() + step.scratch.num_found.abs().sum()) == 0
    return step


def test_maxima_of_tiles_know_ties_padding_and_nan():
    vocab = state.CHUNK + 5
    logits = torch.randn(4, vocab).round()
    logits[1, 300] = math.nan
    logits[2] = -math.inf
    positions = torch.tensor([3, 4, 5, -1], dtype=torch.int32)
    step = a_step(logits, [GREEDY] * 4, positions=positions)
    step.scratch.values.fill_(-9)
    partials(step)
    values, indices = step.scratch.values.cpu(), step.scratch.indices.cpu()
    for tile in range(state.num_tiles(vocab)):
        piece = logits[:3, tile * state.TILE : (tile + 1) * state.TILE]
        torch.testing.assert_close(values[:3, tile], piece.max(1).values, equal_nan=True, rtol=0, atol=0)
        assert indices[0, tile] == tile * state.TILE + int(torch.nonzero(piece[0] == piece[0].max())[0])
    assert indices[1, 1] == 300
    assert (values[3] == -9).all()


@pytest.mark.parametrize("parts", [1, 5, 9000])
def test_greedy_choice_from_maxima_that_the_head_left(parts):
    values = torch.randn(5, parts)
    indices = torch.arange(parts, dtype=torch.int32).repeat(5, 1) * 3
    values[1, parts // 2] = values[1].max() + 1
    values[1, -1] = values[1].max()  # a tie: the first piece wins
    values[2, parts - 1] = math.nan
    values[3, 0] = math.inf
    values[4] = -math.inf
    step = a_step(torch.zeros(5, 3 * parts + 2), [GREEDY] * 5, best=(values.to(DEVICE), indices.to(DEVICE)))
    finish(step)
    best = [3 * int(torch.nonzero(row == row.max())[0]) for row in values[:2]]
    assert step.out.tokens.tolist() == [*best, 0, 0, 0]
    assert step.out.errors.tolist() == [state.OK, state.OK, *[state.NON_FINITE] * 3]
    assert step.table[:, POSITION].flip(0).tolist() == step.out.tokens.tolist()
    assert (step.table != -7).sum() == 5
    assert step.scratch.top[2:].tolist() == [-math.inf] * 3


def test_noise_is_the_references():
    vocab, count = 700, 3

    @triton.jit
    def noise(words, out, position, V: tl.constexpr, BLOCK: tl.constexpr):
        ids = tl.arange(0, BLOCK)
        low, high = row_key(words, position + tl.program_id(0))
        tl.store(out + tl.program_id(0) * V + ids, gumbel(ids, low, high), mask=ids < V)

    words = torch.from_numpy(state_row(SamplingParams(), -12345, 0, 0, vocab)).to(DEVICE)
    out = torch.zeros(count, vocab, device=DEVICE)
    noise[(count,)](words, out, 2**20, vocab, 1024)
    expected = torch.stack([reference.gumbel(-12345, 2**20 + i, vocab) for i in range(count)])
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2e-6, atol=2e-6)


def test_noise_where_a_float_would_round_it():
    """Smallest and largest of 2**32 words: finite, ascending with rarity."""
    v = (torch.tensor([0, 1, 2**31, 2**32 - 1], dtype=torch.float64) + 0.5) * 2.0**-32
    values = -torch.log(-torch.log1p(-v))
    assert values.isfinite().all()
    assert (values.diff() < 0).all()


# ------------------------------------------------------------------ thresholds


def test_kept_tokens_of_usual_rows():
    generator = torch.Generator().manual_seed(1)
    vocab = state.CHUNK + 301  # two chunks
    rows = [torch.randn(vocab, generator=generator) * scale for scale in (0.05, 1.0, 5.0, 30.0)]
    params = [
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=40, temperature=0.3),
        SamplingParams(top_p=0.5, min_p=0.01),
        SamplingParams(top_k=7, top_p=0.8, temperature=5.0),
    ]
    check_kept(rows, params)


def test_kept_tokens_at_ties_go_by_id():
    even = torch.zeros(64)
    steps = torch.tensor([0.0, 1.0, 1.0, -0.0, 1.0, 0.0] * 9)
    steps = torch.nn.functional.pad(steps, (0, 10), value=-math.inf)
    rows = [even, even, steps, steps, even]
    params = [
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.25),  # exactly 16 of 64
        SamplingParams(top_k=30),  # 27 ones, then the first three of the zeros, of either sign
        SamplingParams(top_k=30, top_p=0.98),
        SamplingParams(top_k=63, top_p=1e-9),
    ]
    step = check_kept(rows, params)
    assert cuts(step).sum(1).tolist()[:2] == [5, 16]


def test_kept_tokens_at_the_edges():
    wide = torch.tensor([3e38, -3e38, 0.0, 1e38, -1e-40, 1e-40, -math.inf, 5.0])
    few = torch.full((8,), -math.inf)
    few[5], few[2] = -2.0, -1.0
    rows = [wide, wide, few, few, few, torch.arange(8.0), torch.arange(8.0)]
    params = [
        SamplingParams(top_k=3),
        SamplingParams(top_k=7, temperature=0.01),
        SamplingParams(top_k=5),  # fewer are possible
        SamplingParams(top_k=5, top_p=0.99),
        SamplingParams(top_p=0.5),
        SamplingParams(min_p=0.3, top_k=4),  # min_p leaves two
        SamplingParams(min_p=1.0, top_p=0.1),
    ]
    check_kept(rows, params)


def test_a_list_that_overflows_is_replaced_by_the_row(monkeypatch):
    monkeypatch.setattr(triton_search, "LISTED", 16)
    generator = torch.Generator().manual_seed(2)
    rows = [torch.zeros(700), torch.randn(700, generator=generator), torch.randn(700, generator=generator)]
    check_kept(rows, [SamplingParams(top_p=0.5), SamplingParams(top_k=300, top_p=0.9), SamplingParams(top_k=200)])


def test_a_second_look_when_the_first_leaves_many(monkeypatch):
    monkeypatch.setattr(triton_search, "NARROW", 4)
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(900, generator=generator) * scale for scale in (1.0, 0.2, 3.0)]
    rows.append(torch.cat([torch.full((1,), 40.0), rows[0]])[:900])  # all but one lie beyond the first range
    params = [SamplingParams(top_p=0.9), SamplingParams(top_k=100), SamplingParams(top_k=200, top_p=0.9)]
    check_kept(rows, [*params, SamplingParams(top_k=300)])


# ------------------------------------------------------------------ draws


def test_draws_are_the_references_best_scores():
    generator = torch.Generator().manual_seed(4)
    vocab = state.CHUNK + 77
    rows = torch.randn(6, vocab, generator=generator) * 2
    rows[5, torch.rand(vocab, generator=generator) < 0.9] = -math.inf
    params = [
        GREEDY,
        SamplingParams(),
        SamplingParams(temperature=1e6),
        SamplingParams(temperature=1e-4),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=2.0),
    ]
    step = a_step(rows, params[::-1])
    partials(step)
    finish(step)
    draw(step, searched=False)
    for row, param in enumerate(params):
        slot = int(step.slots[row])
        seed = SEED + slot
        expected = rows[row].double() if param.greedy else reference.scores(rows[row], param, seed, POSITION)
        token = int(step.out.tokens[row])
        assert expected[token] >= expected.max() - 1e-5 * max(1.0, abs(float(expected.max())))
        assert int(step.table[slot, POSITION]) == token
    assert step.out.errors.tolist() == [state.OK] * 6


def test_only_possible_tokens_are_drawn():
    logits = torch.full((3, 40), -math.inf)
    logits[:, 13] = -5.0
    step = a_step(logits, [SamplingParams(), SamplingParams(temperature=1e30), SamplingParams(top_k=1)])
    partials(step)
    finish(step)
    triton_search.search(step)
    draw(step, searched=True)
    assert step.out.tokens.tolist() == [13] * 3


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("vary", ["position", "seed"])
def test_draws_have_the_frequencies_of_the_distribution(vary):
    """12 tokens over 4,000 draws: 11 degrees of freedom, of which 31.3 is the 99.9th percentile."""
    draws, vocab = 4_000, 12
    logits = torch.linspace(-3, 1, vocab).double()
    tokens = torch.empty(draws, dtype=torch.int64)
    for i in range(draws):
        seed, position = (5, i) if vary == "position" else (i, 5)
        tokens[i] = (logits + reference.gumbel(seed, position, vocab)).argmax()
    counts = torch.bincount(tokens, minlength=vocab).double()
    assert chi_square(counts, torch.softmax(logits, 0)) < 31.3
    # And each draw is independent of the one before: pairs of (most likely or not).
    high = tokens == vocab - 1
    p = float(torch.softmax(logits, 0)[-1])
    pairs = torch.bincount(2 * high[:-1].long() + high[1:].long(), minlength=4).double()
    likely = torch.tensor([(1 - p) ** 2, (1 - p) * p, p * (1 - p), p * p], dtype=torch.float64)
    assert chi_square(pairs, likely) < 16.3  # 3 degrees of freedom


def test_a_large_flat_vocabulary_is_drawn_evenly():
    """Which of 16 stripes of 8,192 equal tokens wins, by place and by residue: 15 degrees of freedom."""
    draws, vocab = 1000, 8192
    winners = torch.stack([reference.gumbel(3, position, vocab).argmax() for position in range(draws)])
    even = torch.full((16,), 1 / 16, dtype=torch.float64)
    assert chi_square(torch.bincount(winners * 16 // vocab, minlength=16).double(), even) < 37.7
    assert chi_square(torch.bincount(winners % 16, minlength=16).double(), even) < 37.7
