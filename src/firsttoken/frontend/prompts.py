"""The forms a prompt may have in the Python API, as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from firsttoken.core.errors import InvalidRequest

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}`` (with an optional ``"prompt"`` beside it)."""

_KEYS = {"prompt", "prompt_token_ids"}


def split_prompt(prompt: Prompt) -> tuple[str | None, Sequence[int] | None]:
    """The text and the ids that a prompt gives, at least one of them; the ids count. Raises `InvalidRequest`."""
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping):
        return None, _checked_ids(prompt)
    unknown = sorted(str(key) for key in prompt.keys() - _KEYS)
    if unknown:
        raise InvalidRequest(f"a prompt may hold {sorted(_KEYS)}, not {', '.join(unknown)}", param="prompt")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f"prompt must be a string, got {type(text).__name__}", param="prompt")
    if ids is None and text is None:
        raise InvalidRequest("a prompt needs text (prompt) or token ids (prompt_token_ids)", param="prompt")
    return text, None if ids is None else _checked_ids(ids)


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The single prompts in what `LLM.generate` takes: one prompt of any form, or a sequence of them."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _checked_ids(ids: Any) -> Sequence[int]:
    if isinstance(ids, Sequence) and not isinstance(ids, str | bytes):
        return ids
    raise InvalidRequest(
        f"a prompt must be text, a list of token ids or a dict of these, got {type(ids).__name__}", param="prompt"
    )
