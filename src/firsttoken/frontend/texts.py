"""The text work of one front end: its pool, its prompt cache, and what is made for them at the start."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from firsttoken.core.errors import ConfigError
from firsttoken.text.boundaries import MIN_PIECE, message_gaps
from firsttoken.text.chat_template import ChatTemplate
from firsttoken.text.pace import Pace
from firsttoken.text.pool import TextPool
from firsttoken.text.prompt_cache import PromptCache
from firsttoken.text.prompt_templates import PromptTemplate
from firsttoken.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_FOLLOWS = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"})


def text_pool(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    workers: int,
    prompt_templates: Sequence[PromptTemplate] = (),
) -> TextPool:
    """Some milliseconds of trying what tokenizer and template take, and the time to tokenise ``prompt_templates``.

    Raises `ConfigError` for prompt templates that this model cannot have, or that its chat template refuses.
    """
    cache = _prompt_cache(tokenizer, template)
    if prompt_templates:
        _load(cache, template, prompt_templates)
    trial = None if cache is None else _prompt_cache(tokenizer, template)
    return TextPool(
        tokenizer,
        template,
        workers=workers,
        pace=Pace.measure(tokenizer, template, trial),
        cache=cache,
    )


def _prompt_cache(tokenizer: Tokenizer, template: ChatTemplate | None) -> PromptCache | None:
    """None where prompts cannot be cut: whole prompts would be found by those who send the same twice alone."""
    boundaries = () if template is None else tokenizer.boundaries(message_gaps(template))
    return PromptCache(tokenizer, boundaries) if boundaries else None


def _load(cache: PromptCache | None, template: ChatTemplate | None, given: Sequence[PromptTemplate]) -> None:
    if template is None:
        raise ConfigError(f"{given[0].place}: this model has no chat template; leave --prompt-templates out")
    if cache is None:
        raise ConfigError(
            f"{given[0].place}: this model's chat template and tokenizer put no token between messages at which a "
            "prompt can safely be cut; leave --prompt-templates out"
        )
    for one in given:
        text = one.render(template)
        cache.load([text])
        # As it will be asked for: a template may write a message otherwise when another follows.
        last = one.messages[-1].get("role")
        found = cache.loaded(one.render(template, _FOLLOWS[last == "user"]))
        if not found:
            why = "this model's chat template joins it with the message that follows"
            if len(text) < MIN_PIECE:
                why = f"it is {len(text)} characters long as the model reads it, and {MIN_PIECE} are the least"
            log.warning("%s: nothing of it can be found again in a chat that begins with it: %s", one.place, why)
