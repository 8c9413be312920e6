"""Log-probabilities of a prompt's own tokens, many positions at once, on whatever device their logits are."""

from __future__ import annotations

import torch
from torch import Tensor

# Positions whose logits there are at a time, and of which they are put in order at a time: on a CPU fewer, where more
# would be no faster. `executor.memory_plan` counts what they take.
ROWS_AT_ONCE, CPU_ROWS_AT_ONCE = 32, 4
_SIGN = 1 << 31


def prompt_logprobs(logits: Tensor, targets: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of raw ``logits`` float32 ``[R, V]``, for the tokens ``targets`` int64 ``[R]``: float32 ``[R, 1 + count]``, the
    log-probability of the target and of the ``count`` most likely tokens (ties by the lowest id), and int32 of the
    same shape, the target's rank (1: the most likely) and those tokens' ids, -1 for impossible ones. A row whose
    logits are NaN or endless has NaN for its target.
    """
    if logits.device.type == "cpu" and len(logits) > CPU_ROWS_AT_ONCE:
        pairs = zip(torch.split(logits, CPU_ROWS_AT_ONCE), torch.split(targets, CPU_ROWS_AT_ONCE), strict=True)
        parts = [prompt_logprobs(some, own, count) for some, own in pairs]
        return torch.cat([one for one, _ in parts]), torch.cat([one for _, one in parts])
    vocab = logits.shape[1]
    norm = logits.logsumexp(1, keepdim=True)
    norm = torch.where(norm.isfinite(), norm, torch.nan)
    own = logits.gather(1, targets[:, None])
    ids = torch.arange(vocab, device=logits.device)
    before = (logits > own) | ((logits == own) & (ids < targets[:, None]))
    rank = before.sum(1, keepdim=True).to(torch.int32) + 1
    if not count:
        return own - norm, rank
    # Keys that hold the value above and the id below, so that no two are alike and of equals the lowest id is first. A
    # float's bits rise with its value once those of negative ones are inverted; + 0.0 makes -0.0 equal to 0.0.
    bits = (logits + 0.0).view(torch.int32).long()
    ordered = torch.where(bits < 0, -_SIGN - 1 - bits, bits)
    best = (ordered * vocab + (vocab - 1 - ids)).topk(min(count, vocab), dim=1).indices
    values = logits.gather(1, best)
    shown = torch.where(values.isfinite(), best, -1).to(torch.int32)
    found = torch.cat((own, values), 1) - norm, torch.cat((rank, shown), 1)
    missing = count - best.shape[1]
    if not missing:
        return found
    pad = torch.nn.functional.pad
    return pad(found[0], (0, missing)), pad(found[1], (0, missing), value=-1)
