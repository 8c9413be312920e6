"""How well a model predicts a text, and how far it is from another: through the engine's own door.

Every position of the text is a request of its own: what stands before it is the prompt, the token that follows is
forced, and the answer's log-probabilities, which are of the raw logits, are what the model thought of it. Prompts of a
window begin alike, so the prefix cache has nearly all of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from firsttoken.bench.errors import BenchFailed
from firsttoken.core.agreement import Guess
from firsttoken.core.sampling_params import MAX_LOGPROBS, SamplingParams
from firsttoken.frontend.llm import LLM

# The most that OpenAI allows; a token so far above the others is always chosen.
_FORCED = 100.0
# A round is what is told of between two lines of progress; each ends with a few steps of small batches.
_AT_ONCE = 128


def windows(tokens: Sequence[int], context: int) -> list[list[int]]:
    """The text in pieces of ``context`` tokens, each read without those before it; one of a single token predicts
    nothing and is left out. Raises `BenchFailed` for a text without anything to predict."""
    found = [list(tokens[first : first + context]) for first in range(0, len(tokens), context)]
    found = [window for window in found if len(window) > 1]
    if not found:
        raise BenchFailed(f"the text has {len(tokens)} tokens: two are the least that predict anything")
    return found


def guesses(
    llm: LLM, text: Sequence[Sequence[int]], tell: Callable[[int], None] = lambda _: None, first: int = 1
) -> list[Guess]:
    """What the engine thinks of each position of ``text`` but the ``first`` of each window; ``tell`` is given now and
    then how many are done. Raises `BenchFailed` for a
    model that gives no finite numbers."""
    found: list[Guess] = []
    asked = [(list(window[:end]), window[end]) for window in text for end in range(first, len(window))]
    for jobs in _batches(asked):
        params = [
            SamplingParams(
                temperature=0, max_tokens=1, logprobs=MAX_LOGPROBS, logit_bias={token: _FORCED}, ignore_eos=True
            )
            for _, token in jobs
        ]
        outputs = llm.generate([prompt for prompt, _ in jobs], params)
        for (_, token), output in zip(jobs, outputs, strict=True):
            found.append(_guess(output.outputs[0].logprobs, token, len(found)))
        tell(len(found))
    return found


def _batches(jobs: list[tuple[list[int], int]]) -> Iterator[list[tuple[list[int], int]]]:
    for first in range(0, len(jobs), _AT_ONCE):
        yield jobs[first : first + _AT_ONCE]


def _guess(told: Sequence[Any] | None, token: int, position: int) -> Guess:
    assert told is not None
    by_token = told[0]
    if token not in by_token or not math.isfinite(by_token[token].logprob):
        raise BenchFailed(f"position {position}: the model gave no finite probability for token {token}")
    ranked = sorted(by_token.items(), key=lambda item: item[1].rank)
    return Guess(by_token[token].logprob, tuple((one, what.logprob) for one, what in ranked[:MAX_LOGPROBS]))
