"""What one request may cost, summed over all that multiplies: prompts, answers, tokens, log-probabilities, lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from firsttoken.server.errors import ApiError, bad_request

if TYPE_CHECKING:
    from array import array

    from firsttoken.core.sampling_params import SamplingParams
    from firsttoken.server.call import Call
    from firsttoken.server.state import AppState

# Of a log-probability that is kept until the answer is written, next to a token's KV and row.
_PER_LOGPROB = 4


def allow(
    state: AppState, call: Call, prompts: Sequence[array[int]], params: SamplingParams, *, param: str = "prompt"
) -> None:
    """Before the engine is asked for ``params.n`` answers to each of ``prompts``: within the cost that one request may
    have, and within the quota of its key. ``param`` is what the caller calls the prompt. Raises `ApiError` 400 that
    names the field to lower, or 429."""
    context = state.llm.info.max_model_len
    tokens = sum(map(len, prompts))
    rooms = [max(context - len(prompt), 0) for prompt in prompts]
    output = params.n * sum(room if params.max_tokens is None else min(params.max_tokens, room) for room in rooms)
    try:
        check_cost(state.config.max_request_cost, tokens, len(prompts), output, params)
        call.reserve(tokens, output, asked=params.max_tokens is not None)
    except ApiError as error:
        if error.param == "prompt":
            error.param = param
        elif error.param == "logprobs" and param != "prompt":  # in chats that is a switch
            error.param = "top_logprobs"
        raise


def check_cost(limit: int, prompt_tokens: int, prompts: int, output_tokens: int, params: SamplingParams) -> None:
    """Raises `ApiError` 400. The cost is in tokens: each prompt's, for each of its answers; each answer's longest; four
    for each log-probability; and an answer's lists of tokens."""
    answers = params.n * prompts
    kept = 0 if params.logprobs is None else 1 + params.logprobs
    told = 0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs
    lists = len(params.logit_bias or ()) + len(params.stop_token_ids or ()) + len(params.allowed_token_ids or ())
    parts = {
        "max_tokens": output_tokens,
        "prompt": params.n * prompt_tokens,
        "logprobs": _PER_LOGPROB * output_tokens * kept,
        "prompt_logprobs": _PER_LOGPROB * params.n * prompt_tokens * told,
        "logit_bias": answers * lists,
    }
    cost = sum(parts.values())
    if cost > limit:
        raise _too_costly(cost, limit, parts, answers, output_tokens, params)


def _too_costly(
    cost: int, limit: int, parts: dict[str, int], answers: int, output_tokens: int, params: SamplingParams
) -> ApiError:
    name = max(parts, key=lambda part: parts[part])
    if name in ("max_tokens", "prompt") and answers > 1:
        name = "n" if params.n > 1 else "prompt"
    longest = output_tokens // answers
    what = f"{answers} answers of up to {longest} tokens" if answers > 1 else f"an answer of up to {longest} tokens"
    if params.logprobs is not None:
        what += f" with {params.logprobs} log-probabilities beside each token's"
    return bad_request(
        f"{what} may cost {cost} units, and a request may cost {limit} (--max-request-cost; a unit is a token, of the "
        f"prompt for each answer, and a log-probability takes {_PER_LOGPROB}): ask for fewer answers, a smaller "
        "max_tokens or fewer log-probabilities",
        name,
        "request_too_costly",
    )
