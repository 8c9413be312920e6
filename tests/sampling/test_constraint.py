"""Rows that are held to something, in the host's sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from firsttoken.core.sampling_params import SamplingParams
from firsttoken.sampling.constraint import Masker, allows
from firsttoken.sampling.sampler import Sampler

VOCAB = 211
GREEDY = SamplingParams(temperature=0)


class Held:
    """Allows ``tokens``, of which ``refused`` are not taken."""

    def __init__(self, tokens, refused=()) -> None:
        self.tokens, self.refused = set(tokens), set(refused)
        self.taken, self.asked, self.prepared = [], [], 0

    may_refuse = True

    def mask(self):
        words = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
        for token in self.tokens:
            words[token >> 5] |= np.uint32(1 << (token & 31))
        return words.view(np.int32)

    def take(self, token):
        assert token in self.tokens
        self.asked.append(token)
        if token in self.refused:
            return False
        self.taken.append(token)
        return True

    def take_way_out(self):
        token = min(self.tokens - self.refused)
        self.taken.append(token)
        return token

    def prepare(self):
        self.prepared += 1


def choose(held, logits, params=GREEDY):
    sampler = Sampler(VOCAB, 2)
    sampler.start(0, params, 7, np.zeros(1, dtype=np.int64), 1, (), held)
    batch = sampler.sample(torch.tensor(logits)[None], [0], [1])
    return sampler, batch


@pytest.fixture
def logits():
    return np.random.default_rng(3).normal(size=VOCAB).astype(np.float32)


def test_the_masks_are_applied_as_bits(logits):
    masker = Masker(VOCAB)
    for seed in range(4):
        mask = np.random.default_rng(seed).integers(-(2**31), 2**31, -(-VOCAB // 32)).astype(np.int32)
        bits = np.array([allows(mask, token) for token in range(VOCAB)])
        assert (masker.apply(mask, logits) == np.where(bits, logits, -np.inf)).all()
        assert bits.tolist() == np.unpackbits(mask.view(np.uint8), count=VOCAB, bitorder="little").astype(bool).tolist()


def test_the_likeliest_of_all_is_taken_without_a_look_at_the_others(logits, monkeypatch):
    monkeypatch.setattr(Masker, "apply", lambda *_: pytest.fail("the mask was applied"))
    best = int(logits.argmax())
    held = Held({best, 5, 9})
    _, batch = choose(held, logits)
    assert batch.tokens.tolist() == held.taken == [best]


def test_the_likeliest_of_those_allowed_is_taken(logits):
    order = np.argsort(-logits).tolist()
    held = Held(order[3:])
    _, batch = choose(held, logits)
    assert batch.tokens.tolist() == [order[3]]


def test_whoever_is_refused_is_struck_out_and_after_some_the_way_out_is_taken(logits):
    order = np.argsort(-logits).tolist()
    held = Held(order, refused=order[:2])
    _, batch = choose(held, logits)
    assert held.asked == order[:3]
    assert batch.tokens.tolist() == [order[2]]
    held = Held(order, refused=order[:100])
    _, batch = choose(held, logits)
    assert held.asked == order[:4]
    assert batch.tokens.tolist() == held.taken == [min(order[100:])]
    held = Held(order[1:4], refused=order[1:3])
    _, batch = choose(held, logits)
    assert batch.tokens.tolist() == [order[3]]


@pytest.mark.parametrize("params", [SamplingParams(seed=1), SamplingParams(top_k=5), SamplingParams(top_p=0.7)])
def test_whatever_draws_draws_from_what_is_allowed(logits, params):
    allowed = [3, 40, 41, 200]
    for refused in ([], [40]):
        held = Held(allowed, refused)
        _, batch = choose(held, logits, params)
        assert batch.tokens.tolist() == held.taken
        assert held.taken[0] in set(allowed) - set(refused)


def test_the_next_masks_are_made_when_the_tokens_were_handed_over(logits):
    held = Held({1, 2})
    sampler, _ = choose(held, logits)
    assert held.prepared == 0
    sampler.prepare()
    sampler.prepare()
    assert held.prepared == 1
