"""Texts that an answer must not hold, as the tokens that would write them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams

if TYPE_CHECKING:
    from firsttoken.text.tokenizer import Tokenizer


def spell(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """With ``bad_words`` also as tokens: as each begins a text, and as it follows a space, where that differs. As in
    vLLM, a word that an answer writes with other tokens than these is not recognised. Raises `InvalidRequest`."""
    if not params.bad_words:
        return params
    if tokenizer is None:
        raise InvalidRequest(
            "bad_words need a tokenizer, and this model has none: use bad_words_token_ids", param="bad_words"
        )
    spelt = list(params.bad_words_token_ids or ())
    for word in params.bad_words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False, parse_special=False))
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(
                    f"bad_words: {word!r:.80} takes {len(ids)} tokens, and {MAX_BAD_WORD_TOKENS} are the most",
                    param="bad_words",
                )
            if ids and ids not in spelt:
                spelt.append(ids)
    return params.replace(bad_words=None, bad_words_token_ids=spelt)


async def spelt(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """`spell`, in a thread where there are words."""
    return await asyncio.to_thread(spell, params, tokenizer) if params.bad_words else params
