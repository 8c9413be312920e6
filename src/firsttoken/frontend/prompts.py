"""The forms a prompt may have in the Python API, as in vLLM."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.sampling_params import SamplingParams

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
    """The single prompts in what `LLM.generate` takes: one prompt of any form, or several. Raises `InvalidRequest`."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise InvalidRequest(
            f"prompts must be text, token ids, a dict of these or a list of such, got {type(prompts).__name__}",
            param="prompt",
        )
    items: list[Any] = [_plain(item) for item in prompts]
    return [items] if items and isinstance(items[0], int) else items


def cut_to_last(ids: array[int], keep: int | None, context: int, max_tokens: int | None = 0) -> array[int]:
    """The last ``keep`` of ``ids``, as vLLM's ``truncate_prompt_tokens``: all with None; with -1 as many as a context
    of ``context`` tokens takes beside ``max_tokens`` of output, or beside one. Raises `InvalidRequest` for more than
    fit."""
    if keep is None:
        return ids
    most = context if max_tokens == 0 else context - 1
    if keep != -1 and not 1 <= keep <= most:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or in [1, {most}], the most that fit here, got {keep}",
            param="truncate_prompt_tokens",
        )
    return ids[-(max(min(most, context - (max_tokens or 0)), 1) if keep == -1 else keep) :]


def cut_as_asked(ids: array[int], params: SamplingParams, context: int) -> array[int]:
    """`cut_to_last` as ``params`` have it."""
    return cut_to_last(ids, params.truncate_prompt_tokens, context, params.max_tokens)


def _plain(item: Any) -> Any:
    """Arrays of other libraries (numpy, torch) and their scalars, as lists and numbers of Python's own."""
    return item.tolist() if hasattr(item, "tolist") and not isinstance(item, array) else item


def _checked_ids(ids: Any) -> Sequence[int]:
    ids = _plain(ids)
    if isinstance(ids, Sequence) and not isinstance(ids, str | bytes):
        return ids
    raise InvalidRequest(
        f"a prompt must be text, a list of token ids or a dict of these, got {type(ids).__name__}", param="prompt"
    )
