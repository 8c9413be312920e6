"""Log-probabilities of many positions at once against the plain definition."""

from __future__ import annotations

import math

import pytest
import torch

from firsttoken.core.plan import PromptLogprobs
from firsttoken.sampling import reference
from firsttoken.sampling.prompt_logprobs import prompt_logprobs


def entries(logits, targets, count):
    values, ids = prompt_logprobs(logits, torch.tensor(targets), count)
    return list(PromptLogprobs(count, values.numpy().tobytes(), ids.numpy().tobytes()).entries())


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_each_row_is_as_defined_with_ties_and_impossible_tokens(count):
    generator = torch.Generator().manual_seed(count)
    logits = (torch.randn((40, 53), generator=generator) * 2).round()  # whole numbers: full of ties
    logits[::3, 4:50] = -math.inf
    logits[5] = 0.0
    logits[6, :2] = torch.tensor([-0.0, 0.0])
    targets = [row % 53 for row in range(40)]
    for row, found in enumerate(entries(logits, targets, count)):
        expected = reference.logprobs(logits[row], targets[row], count)
        assert found.rank == expected.rank
        assert found.top_ids == expected.top_ids
        assert found.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-5)
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-5)


def test_more_alternatives_than_tokens_are_those_that_there_are():
    [found] = entries(torch.tensor([[0.0, 2.0, -math.inf]]), [2], 20)
    assert (found.top_ids, found.rank, found.logprob) == ([1, 0], 3, -math.inf)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_marked(bad):
    values, _ = prompt_logprobs(torch.tensor([[0.0, bad, 1.0], [0.0, 1.0, 2.0]]), torch.tensor([0, 0]), 2)
    assert torch.isnan(values[:, 0]).tolist() == [True, False]
