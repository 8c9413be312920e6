"""Which requests can never run."""

from __future__ import annotations

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.request import Request
from firsttoken.kvcache import KVCache


def refusal(request: Request, kv: KVCache, max_model_len: int) -> InvalidRequest | None:
    """Why a request can never run, with the numbers; None when it can."""
    prompt = request.num_prompt
    if prompt == 0:
        return InvalidRequest("the prompt has no tokens; give at least one", param="prompt", code="empty_prompt")
    if request.max_tokens < 1:
        return InvalidRequest(f"max_tokens must be 1 or more, got {request.max_tokens}", param="max_tokens")
    if not 0 < request.share < float("inf"):
        return InvalidRequest(f"the share of a tenant must be more than 0, got {request.share!r}", param="share")
    if request.prompt_only and prompt > max_model_len:
        return InvalidRequest(
            f"the prompt has {prompt} tokens, and at most {max_model_len} fit; shorten it or truncate it",
            param="prompt",
            code="context_length_exceeded",
        )
    if prompt >= max_model_len and not request.prompt_only:
        return InvalidRequest(
            f"the prompt has {prompt} tokens, but prompt and output together may have at most {max_model_len} and the "
            f"output has at least one; shorten the prompt to {max_model_len - 1} tokens",
            param="prompt",
            code="context_length_exceeded",
        )
    output = 0 if request.prompt_only else min(request.max_tokens, max_model_len - prompt)
    # The KV of the last token is never needed.
    blocks = kv.blocks_for(prompt + max(output, 1) - 1)
    if blocks > kv.num_blocks:
        room = kv.num_blocks * kv.block_tokens + 1
        return InvalidRequest(
            f"{prompt} prompt tokens and {output} output tokens need {blocks} KV blocks of {kv.block_tokens} tokens, "
            f"but the cache has {kv.num_blocks}; ask for at most {room} tokens in all, or start the engine with more "
            "KV memory",
            param="max_tokens" if prompt < room else "prompt",
            code="kv_capacity_exceeded",
        )
    return None
