"""The log-probabilities of prompts in the shapes of answers, made as they are taken. Some microseconds a token."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

from firsttoken.core.plan import PromptLogprobs, TokenLogprobs
from firsttoken.server.encode import TokenNames, floor


def told(names: TokenNames, prompt: array[int], found: PromptLogprobs, top: int) -> Iterator[dict[str, Any] | None]:
    """As vLLM's ``prompt_logprobs``: for each token of the prompt those of the token itself and of the ``top`` most
    likely ones, by id; null for the first token, which nothing precedes."""
    yield None
    for token, entry in zip(prompt[1:], found.entries(), strict=True):
        yield _by_id(names, token, entry, top)


def _by_id(names: TokenNames, token: int, found: TokenLogprobs, top: int) -> dict[str, Any]:
    entry = {str(token): _entry(names, token, found.logprob, found.rank)}
    pairs = zip(found.top_ids[:top], found.top_logprobs, strict=False)
    for rank, (other, logprob) in enumerate(pairs, 1):
        entry.setdefault(str(other), _entry(names, other, logprob, rank))
    return entry


def _entry(names: TokenNames, token: int, logprob: float, rank: int) -> dict[str, Any]:
    decoded = names.raw(token).decode("utf-8", "replace")
    return {"logprob": floor(logprob), "rank": rank, "decoded_token": decoded}


def of_prompt(prompt: array[int], found: PromptLogprobs) -> Iterator[tuple[int, TokenLogprobs | None]]:
    """Each token of an echoed prompt and what is told of it: nothing, of the first."""
    yield prompt[0], None
    yield from zip(prompt[1:], found.entries(), strict=True)
