"""The sampler against its float64 reference, and each rule on its own."""

import json
import math
from array import array

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.random import uniform
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.sampling import Sampler, reference
from firsttoken.sampling.choose import choose, descending, largest

GREEDY = SamplingParams(temperature=0)
MARGIN = 1e-5  # float32 against float64: a draw this near to a border of the CDF may fall on either side


def alone(logits, params, *, tokens=(1, 2, 3), num_prompt=None, stop_ids=(), seed=0, position=None):
    sampler = Sampler(logits.shape[-1], 1)
    num_prompt = len(tokens) if num_prompt is None else num_prompt
    sampler.start(0, params, seed, array("I", tokens), num_prompt, stop_ids)
    return sampler.sample(logits.reshape(1, -1), [0], [len(tokens) if position is None else position])


@st.composite
def cases(draw, vocab=None):
    vocab = vocab or draw(st.sampled_from([5, 37, 257, 1000, 5003]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(vocab, generator=generator) * draw(st.sampled_from([0.01, 0.5, 3.0, 12.0]))
    if draw(st.booleans()):
        logits = (logits * 2).round() / 2  # many ties
    if draw(st.booleans()):
        logits[torch.rand(vocab, generator=generator) < 0.3] = -math.inf
        logits[draw(st.integers(0, vocab - 1))] = 1.0
    ids = st.integers(0, vocab - 1)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0, 1e6])),
        top_p=draw(st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0])),
        top_k=draw(st.sampled_from([-1, 0, 1, 2, 50, 3000])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.3, -1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.5])),
        logit_bias=draw(st.none() | st.dictionaries(ids, st.sampled_from([-100.0, -1.0, 2.5, 100.0]), max_size=5)),
        min_tokens=draw(st.sampled_from([0, 0, 3])),
        logprobs=draw(st.sampled_from([None, 0, 1, 5, 20])),
        allowed_token_ids=draw(st.none() | st.lists(ids, min_size=1, max_size=30)),
    )
    prompt = draw(st.lists(ids, min_size=1, max_size=20))
    output = draw(st.lists(ids, max_size=6))
    stop_ids = tuple(draw(st.lists(ids, max_size=3)))
    if draw(st.booleans()):  # some that the output is about to complete
        ends = [[*output[len(output) - n :], draw(ids)] for n in range(min(len(output), 2) + 1)]
        params = params.replace(bad_words_token_ids=[*ends, *draw(st.lists(st.lists(ids, min_size=1), max_size=3))])
    return logits, params, prompt, output, stop_ids


def clear_of_borders(row, params):
    """False where float32 rounding may rightly keep one token more or less than float64."""
    if params.greedy:
        first, second = torch.topk(row, 2).values.tolist()
        return first == second or first - second > 1e-5 * max(abs(first), 1)
    z = (row - row.max()) / params.temperature
    if params.min_p > 0 and bool(((z - math.log(params.min_p)).abs() < 1e-4).any()) and params.min_p < 1:
        return False
    kept = reference.probabilities(row, params.replace(top_p=1.0))
    cdf = torch.cumsum(torch.sort(kept, descending=True).values, dim=0)
    return params.top_p == 1 or not bool(((cdf - params.top_p).abs() < MARGIN).any())


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(0, 2**63 - 1))
def test_agrees_with_the_reference(case, seed):
    logits, params, prompt, output, stop_ids = case
    row = reference.process(logits, params, prompt, output, stop_ids)
    # The rounding of processed logits to float32 decides ties: the reference gets it too.
    row = row.float().double()
    tokens = [*prompt, *output]
    batch = alone(logits, params, tokens=tokens, num_prompt=len(prompt), stop_ids=stop_ids, seed=seed)
    token = int(batch.tokens[0])
    if float(row.max()) == -math.inf:
        assert batch.errors[0]
        return
    assert batch.errors == [None]
    assume(clear_of_borders(row, params))
    probs = reference.probabilities(row, params)
    u = uniform(seed, len(tokens))
    before = float(probs[:token].sum())
    assert probs[token] > 0
    assert before - MARGIN <= u <= before + float(probs[token]) + MARGIN
    if params.logprobs is None:
        assert batch.logprobs == [None]
    else:
        got, expected = batch.logprobs[0], reference.logprobs(logits, token, params.logprobs)
        assert (got.rank, got.top_ids) == (expected.rank, expected.top_ids)
        assert got.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert got.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 2**31), st.data())
def test_a_row_does_not_see_its_neighbours(case, seed, data):
    """Bitwise the same alone, in a batch of other requests, and in any order."""
    logits, params, prompt, output, stop_ids = case
    vocab = len(logits)
    rows = [case, *data.draw(st.lists(cases(vocab), min_size=1, max_size=4))]
    rows += [(torch.roll(logits, 1), GREEDY, prompt, [], ()), (torch.full((vocab,), math.nan), params, prompt, [], ())]
    order = data.draw(st.permutations(range(len(rows))))
    sampler = Sampler(vocab, len(rows) + 3)
    for index, (_, row_params, row_prompt, row_output, row_stops) in enumerate(rows):
        tokens = array("I", [*row_prompt, *row_output])
        sampler.start(index + 3, row_params, seed, tokens, len(row_prompt), row_stops)
    expected = alone(logits, params, tokens=[*prompt, *output], num_prompt=len(prompt), stop_ids=stop_ids, seed=seed)
    batch = sampler.sample(
        torch.stack([rows[i][0] for i in order]),
        [i + 3 for i in order],
        [len(rows[i][2]) + len(rows[i][3]) for i in order],
    )
    place = order.index(0)
    assert int(batch.tokens[place]) == int(expected.tokens[0])
    assert batch.logprobs[place] == expected.logprobs[0]
    assert batch.errors[place] == expected.errors[0]
    assert batch.errors[order.index(len(rows) - 1)] == "non-finite logits"


def test_penalty_and_seed_rows_equal_their_solo_runs_in_both_orders():
    vocab, steps = 1000, 5
    generator = torch.Generator().manual_seed(3)
    a = (
        SamplingParams(temperature=0, repetition_penalty=2.0),
        [5, 6, 7, 8, 9, 10],
        torch.randn(steps, vocab, generator=generator),
    )
    b = (SamplingParams(seed=99, top_k=1), [1], torch.randn(steps, vocab, generator=generator) * 4)

    def run(rows):
        sampler = Sampler(vocab, 4)
        out = [[] for _ in rows]
        for slot, (params, prompt, _) in enumerate(rows):
            sampler.start(slot, params, 99, array("I", prompt), len(prompt))
        for step in range(steps):
            logits = torch.stack([row[2][step] for row in rows])
            positions = [len(row[1]) + step for row in rows]
            for slot, token in enumerate(sampler.sample(logits, range(len(rows)), positions).tokens.tolist()):
                out[slot].append(token)
        return out

    solo_a, solo_b = run([a])[0], run([b])[0]
    assert run([a, b]) == [solo_a, solo_b]
    assert run([b, a]) == [solo_b, solo_a]


def test_readmission_continues_as_if_never_preempted():
    vocab = 300
    params = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.4, min_tokens=6)
    rows = torch.randn(12, vocab, generator=torch.Generator().manual_seed(1))
    whole, split = Sampler(vocab, 1), Sampler(vocab, 2)
    prompt = [4, 4, 8]
    for sampler in (whole, split):
        sampler.start(0, params, 5, array("I", prompt), 3, (2, 9))
    tokens, slot = list(prompt), 0
    for step in range(12):
        if step in (4, 9):
            split.retire(slot)
            slot = 1 - slot
            split.start(slot, params, 5, torch.tensor(tokens), 3, (2, 9))
        expected = int(whole.sample(rows[step : step + 1], [0], [3 + step]).tokens[0])
        assert int(split.sample(rows[step : step + 1], [slot], [3 + step]).tokens[0]) == expected
        tokens.append(expected)


class TestGuard:
    @pytest.mark.parametrize("bad", [math.nan, math.inf, "all masked"])
    @pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(temperature=0, logprobs=2)])
    def test_a_bad_row_gets_an_error_and_harms_no_other(self, bad, params):
        logits = torch.randn(4, 101, generator=torch.Generator().manual_seed(0))
        expected = [int(alone(row, params, seed=i).tokens[0]) for i, row in enumerate(logits)]
        if bad == "all masked":
            logits[2] = -math.inf
        else:
            logits[2, 100] = bad
        sampler = Sampler(101, 4)
        for slot in range(4):
            sampler.start(slot, params, slot, array("I", [1, 2, 3]), 3)
        batch = sampler.sample(logits, [0, 1, 2, 3], [3] * 4)
        assert batch.errors == [None, None, "non-finite logits", None]
        assert [int(batch.tokens[i]) for i in (0, 1, 3)] == [expected[i] for i in (0, 1, 3)]
        assert int(batch.tokens[2]) == 0
        assert batch.logprobs[2] is None

    def test_nan_anywhere_in_a_wide_row_is_seen(self):
        for place in (0, 1, 31, 32, 1000, 49150, 49151):
            logits = torch.zeros(1, 49152)
            logits[0, place] = math.nan
            assert alone(logits, GREEDY).errors == ["non-finite logits"]

    def test_minus_infinity_of_the_model_is_a_mask(self):
        logits = torch.full((50,), -math.inf)
        logits[7] = -3.0
        for params in (GREEDY, SamplingParams(), SamplingParams(top_k=5), SamplingParams(temperature=1e300)):
            batch = alone(logits, params)
            assert (int(batch.tokens[0]), batch.errors) == (7, [None])

    def test_everything_masked_by_the_request_is_an_error_of_that_row(self):
        batch = alone(torch.zeros(3), SamplingParams(min_tokens=1), tokens=(1,), stop_ids=(0, 1, 2))
        assert batch.errors[0].startswith("no token can be chosen")


class TestRules:
    def test_ties_go_to_the_lowest_id(self):
        logits = torch.zeros(5000)
        logits[[17, 3000, 4999]] = 20.0
        for params in (
            GREEDY,
            SamplingParams(top_k=1),
            SamplingParams(top_p=0.01),
            SamplingParams(temperature=0, logprobs=3),
        ):
            assert int(alone(logits, params).tokens[0]) == 17
        assert alone(logits, SamplingParams(temperature=0, logprobs=3)).logprobs[0].top_ids == [17, 3000, 4999]

    def test_min_tokens_forbids_stop_ids_until_reached(self):
        logits = torch.tensor([0.0, 1.0, 9.0, 8.0])
        params = SamplingParams(temperature=0, min_tokens=2)
        args = {"tokens": (0, 0), "stop_ids": (2, 3, 777)}
        assert [int(alone(logits, params, position=p, **args).tokens[0]) for p in (2, 3, 4)] == [1, 1, 2]

    def test_penalties_count_output_and_prompt_as_they_should(self):
        logits = torch.tensor([5.0, 4.9, 4.8, -4.0])
        args = {"tokens": (0, 1), "num_prompt": 1}  # 0 in the prompt, 1 in the output
        pick = {}
        for name, value in (("repetition_penalty", 1.5), ("presence_penalty", 1.0), ("frequency_penalty", 1.0)):
            pick[name] = int(alone(logits, SamplingParams(temperature=0, **{name: value}), **args).tokens[0])
        assert pick == {"repetition_penalty": 2, "presence_penalty": 0, "frequency_penalty": 0}

    def test_generated_tokens_are_counted_inside(self):
        sampler = Sampler(4, 1)
        sampler.start(0, SamplingParams(temperature=0, frequency_penalty=1.0), 0, array("I", [3]), 1)
        logits = torch.tensor([[2.5, 2.0, 0.9, 0.0]])
        assert [int(sampler.sample(logits, [0], [i]).tokens[0]) for i in range(1, 6)] == [0, 1, 0, 1, 2]

    def test_penalties_never_leave_the_float_range(self):
        for penalty in (1e-300, 1e6):
            params = SamplingParams(repetition_penalty=penalty, presence_penalty=-2)
            batch = alone(torch.tensor([1e30, -1e35, 0.0, 2.0]), params, tokens=(0, 1, 2))
            assert batch.errors == [None]

    def test_logits_are_left_unchanged(self):
        logits = torch.randn(2, 100)
        before = logits.clone()
        sampler = Sampler(100, 2)
        for slot in range(2):
            params = SamplingParams(logit_bias={1: 5.0}, repetition_penalty=1.5, min_tokens=9, logprobs=1)
            sampler.start(slot, params, 0, array("I", [1, 2]), 2, (5,))
        sampler.sample(logits, [0, 1], [2, 2])
        assert torch.equal(logits, before)

    def test_impossible_tokens_are_left_out_and_json_is_safe(self):
        logits = torch.full((100,), -math.inf)
        logits[[3, 50]] = torch.tensor([1.0, 2.0])
        found = alone(logits, SamplingParams(temperature=0, logprobs=5)).logprobs[0]
        assert found.top_ids == [50, 3]
        json.dumps([found.logprob, *found.top_logprobs], allow_nan=False)
        bias = SamplingParams(logit_bias=dict.fromkeys(range(99), -100.0), logprobs=5)
        batch = alone(torch.zeros(100), bias)
        assert int(batch.tokens[0]) == 99
        json.dumps([batch.logprobs[0].logprob, *batch.logprobs[0].top_logprobs], allow_nan=False)

    def test_chosen_token_below_the_alternatives_has_its_rank(self):
        logits = torch.arange(50.0)
        found = alone(logits, SamplingParams(temperature=0, logit_bias={10: 100.0}, logprobs=2)).logprobs[0]
        assert (found.rank, found.top_ids) == (40, [49, 48])

    def test_no_rows(self):
        batch = Sampler(10, 2).sample(torch.empty(0, 10), [], [])
        assert (batch.tokens.tolist(), batch.logprobs, batch.errors) == ([], [], [])
        assert batch.tokens.dtype == torch.int64


class TestRefusals:
    def test_logits_of_another_shape_or_type(self):
        sampler = Sampler(10, 1)
        sampler.start(0, GREEDY, 0, array("I", [1]), 1)
        for logits in (torch.zeros(1, 11), torch.zeros(2, 10), torch.zeros(1, 10, dtype=torch.bfloat16)):
            with pytest.raises(ValueError, match="logits must be float32"):
                sampler.sample(logits, [0], [1])

    def test_a_slot_that_was_retired(self):
        sampler = Sampler(10, 1)
        sampler.start(0, GREEDY, 0, array("I", [1]), 1)
        sampler.retire(0)
        sampler.retire(0)
        with pytest.raises(ValueError, match="slot 0 was not started"):
            sampler.sample(torch.zeros(1, 10), [0], [1])

    def test_ids_outside_the_vocabulary(self):
        with pytest.raises(InvalidRequest, match="logit_bias"):
            Sampler(10, 1).start(0, SamplingParams(logit_bias={10: 1.0}), 0, array("I", [1]), 1)
        with pytest.raises(ValueError, match="11 to 11"):
            Sampler(10, 1).start(0, SamplingParams(presence_penalty=1.0), 0, array("I", [11]), 1)


class TestDistribution:
    """Chi-square of 10,000 draws against the float64 distribution."""

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(),
            SamplingParams(temperature=0.6),
            SamplingParams(temperature=1.8),
            SamplingParams(top_p=0.8),
            SamplingParams(top_k=7),
            SamplingParams(min_p=0.1),
            SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
        ],
    )
    @pytest.mark.parametrize("over", ["positions", "seeds"])
    def test_chi_square(self, params, over):
        draws, vocab = 10_000, 600
        logits = torch.randn(vocab, generator=torch.Generator().manual_seed(11)) * 2
        probs = reference.probabilities(logits.double(), params).numpy()
        row, top = logits.numpy(), float(logits.max())
        us = (uniform(9, i) if over == "positions" else uniform(i, 9) for i in range(draws))
        counts = np.bincount([choose(row, top, params, u) for u in us], minlength=vocab)
        assert counts[probs == 0].sum() == 0
        likely = probs * draws >= 5
        seen = np.append(counts[likely], counts[~likely].sum())
        wanted = np.append(probs[likely], probs[~likely].sum()) * draws
        seen, wanted = seen[wanted > 0], wanted[wanted > 0]
        freedom = len(seen) - 1
        chi2 = float(((seen - wanted) ** 2 / wanted).sum())
        assert chi2 < freedom + 4 * math.sqrt(2 * freedom) + 4  # beyond it with probability about 1e-4


class TestChoose:
    @settings(max_examples=200, deadline=None)
    @given(st.integers(1, 6000), st.integers(1, 6000), st.integers(0, 2**32), st.booleans())
    def test_largest_and_descending(self, size, count, seed, ties):
        values = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
        if ties:
            values = np.round(values)  # holds 0.0 and -0.0 too
            values[::7] = -np.inf
        order = np.argsort(-values, kind="stable")
        count = min(count, size)
        assert descending(values).tolist() == order.tolist()
        assert largest(values, count).tolist() == sorted(order[:count].tolist())

    @pytest.mark.parametrize("u", [0.0, 0.3, 1 - 2**-53])
    @pytest.mark.parametrize("vocab", [1, 255, 256, 257, 4099])
    def test_extreme_draws_never_pick_an_impossible_token(self, vocab, u):
        row = np.full(vocab, -np.inf, dtype=np.float32)
        row[vocab // 2] = 1.0
        for params in (SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(top_k=3), SamplingParams(min_p=0.1)):
            assert choose(row, 1.0, params, u) == vocab // 2

    @pytest.mark.parametrize("top_p", [0.3, 0.95, 0.9999])
    @pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 4.0])
    def test_wide_nucleus_keeps_what_the_reference_keeps(self, top_p, scale):
        """Vocabulary-sized: the histogram and the widening thresholds."""
        logits = torch.randn(32_003, generator=torch.Generator().manual_seed(2)) * scale
        params = SamplingParams(top_p=top_p)
        probs = reference.probabilities(logits.double(), params)
        cdf = torch.cumsum(probs, 0)
        for i in range(200):
            u = uniform(1, i)
            token = choose(logits.numpy(), float(logits.max()), params, u)
            assert probs[token] > 0
            assert float(cdf[token] - probs[token]) - MARGIN <= u <= float(cdf[token]) + MARGIN
