"""The log-probabilities of prompts in the shapes of answers. Some microseconds a token: work for threads."""

from __future__ import annotations

from array import array
from typing import Any

from firsttoken.core.plan import PromptLogprobs, TokenLogprobs
from firsttoken.server.encode import TokenNames, floor


def told(names: TokenNames, prompt: array[int], found: PromptLogprobs, top: int) -> list[dict[str, Any] | None]:
    """As vLLM's ``prompt_logprobs``: for each token of the prompt those of the token itself and of the ``top`` most
    likely ones, by id; null for the first token, which nothing precedes."""
    entries = zip(prompt[1:], found.entries(), strict=True)
    return [None, *(_by_id(names, token, entry, top) for token, entry in entries)]


def _by_id(names: TokenNames, token: int, found: TokenLogprobs, top: int) -> dict[str, Any]:
    entry = {str(token): _entry(names, token, found.logprob, found.rank)}
    pairs = zip(found.top_ids[:top], found.top_logprobs, strict=False)
    for rank, (other, logprob) in enumerate(pairs, 1):
        entry.setdefault(str(other), _entry(names, other, logprob, rank))
    return entry


def _entry(names: TokenNames, token: int, logprob: float, rank: int) -> dict[str, Any]:
    decoded = names.raw(token).decode("utf-8", "replace")
    return {"logprob": floor(logprob), "rank": rank, "decoded_token": decoded}


def echoed(names: TokenNames, prompt: array[int], found: PromptLogprobs, top: int) -> dict[str, Any]:
    """The four parallel lists of completions for an echoed prompt; null for what the first token has not."""
    return names.legacy(prompt, [None, *found.entries()], top, 0)
