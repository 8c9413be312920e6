"""What the scripted engine makes of prompts: vectors and log-probabilities that a test can work out by itself."""

from __future__ import annotations

from array import array

from firsttoken.core.plan import PromptLogprobs
from firsttoken.core.request import Request

STUB_VECTOR = 8  # numbers


def pooled(request: Request) -> bytes | None:
    """How often each residue of token ids modulo 8 occurs in the prompt: by the token for the mean, and for the last
    token alone."""
    if request.pooling is None:
        return None
    counted = request.tokens if request.pooling == "mean" else request.tokens[-1:]
    vector = array("f", [0.0] * STUB_VECTOR)
    for token in counted:
        vector[token % STUB_VECTOR] += 1 / len(counted)
    return vector.tobytes()


def prompt_logprobs(request: Request, vocab_size: int) -> PromptLogprobs | None:
    """Each token at -0.5, then its successors in the vocabulary, each one less likely by 1, as those of answers."""
    count = request.params.prompt_logprobs
    if count is None:
        return None
    values, ids = array("f"), array("i")
    for token in request.tokens[1 : request.num_prompt]:
        values.extend([-0.5, *(-0.5 - rank for rank in range(count))])
        ids.extend([1, *((token + rank) % vocab_size for rank in range(count))])
    return PromptLogprobs(count, values.tobytes(), ids.tobytes())
