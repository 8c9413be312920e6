"""The sampler as it is defined, plainly: one row, float64, everything sorted. The fast one is tested against it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from firsttoken.core.plan import TokenLogprobs
from firsttoken.core.sampling_params import SamplingParams

_FLOAT32_MAX = torch.finfo(torch.float32).max


def process(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop_ids: Sequence[int]
) -> Tensor:
    """Allowed tokens, bias, minimum length, penalties and bad words, applied to raw ``logits`` [V]: float64 [V]."""
    row = logits.double().clone()
    if params.allowed_token_ids is not None:
        for token in set(range(len(row))) - set(params.allowed_token_ids):
            row[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    if len(output) < params.min_tokens:
        for token in stop_ids:
            row[token] = -math.inf
    counts = Counter(output)
    for token in {*prompt, *output} if params.has_penalties else set():
        value = float(row[token])
        value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * counts[token]
        value -= params.presence_penalty * (counts[token] > 0)
        row[token] = min(value, _FLOAT32_MAX)
    for ids in params.bad_words_token_ids or ():
        if [*output, ids[-1]][-len(ids) :] == list(ids):
            row[ids[-1]] = -math.inf
    return row


def probabilities(row: Tensor, params: SamplingParams) -> Tensor:
    """The distribution (float64 [V], sums to 1) that processed logits ``row`` become under temperature, min_p, top_k
    and top_p, each applied to what the one before left, renormalised."""
    if params.greedy:
        return torch.nn.functional.one_hot(_order(row)[0], len(row)).double()
    probs = torch.softmax(row / params.temperature, dim=0)
    probs = torch.where(probs >= params.min_p * probs.max(), probs, 0.0)
    order = _order(probs)
    if 0 < params.top_k < len(row):
        probs[order[params.top_k :]] = 0.0
    probs /= probs.sum()
    if params.top_p < 1:
        before = torch.cumsum(probs[order], dim=0) - probs[order]
        probs[order[before >= params.top_p]] = 0.0
        probs /= probs.sum()
    return probs


def choose(probs: Tensor, u: float) -> int:
    """Inverse CDF over token ids: the first token at which the cumulative probability exceeds ``u``."""
    cdf = torch.cumsum(probs, dim=0)
    return int(torch.searchsorted(cdf, u * float(cdf[-1]), right=True).clamp(max=len(probs) - 1))


def logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    """Log-probabilities of raw ``logits`` [V]: the chosen ``token``, its rank, the ``count`` most likely possible
    tokens."""
    values = torch.log_softmax(logits.double(), dim=0)
    order = _order(logits)
    best = [i for i in order[:count].tolist() if math.isfinite(values[i])]
    return TokenLogprobs(
        logprob=float(values[token]),
        rank=order.tolist().index(token) + 1,
        top_ids=best,
        top_logprobs=[float(values[i]) for i in best],
    )


def _order(values: Tensor) -> Tensor:
    """Ids by value descending, equal ones by id."""
    return torch.sort(values, descending=True, stable=True).indices
