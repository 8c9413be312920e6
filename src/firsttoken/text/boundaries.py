"""Where a rendered prompt may be cut, so that the tokens of its pieces, joined, are the tokens of the whole.

A tokenizer first looks for its added tokens in the raw text, from left to right, the longest at a place first; what
lies between two of them is normalised, cut into words and merged by itself. So nothing reaches across such a token,
and the text may be cut before one, provided that

- it is found wherever its text stands: no other added token holds it, and none ends in its beginning;
- nobody looks beyond it: no added token wants word boundaries, and this one takes no blanks from its left;
- each step sees the piece it is given alone (Metaspace also asks whether it stands at the very beginning, where after
  a cut there is the token), and merges are not random (dropout).

What cannot be shown for a tokenizer is not assumed: it gets no places to cut. The rules are those of the
`tokenizers` library's `AddedVocabulary`; the tests compare with tokenising the whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend
from tokenizers import models

from firsttoken.core.errors import InvalidRequest

if TYPE_CHECKING:
    from firsttoken.text.chat_template import ChatTemplate

MIN_PIECE = 256
"""Characters of the shortest piece but the last: about what is tokenised in the time of looking some pieces up."""

_ROLES = ("user", "assistant", "user", "assistant", "user")
_PROBE = [{"role": role, "content": f"question{number}"} for number, role in enumerate(_ROLES)]
# Steps that see the piece they are given and nothing else. One that is not listed is not known to.
_PURE = frozenset(
    {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Replace", "Prepend", "Strip", "Precompiled"}
    | {"ByteLevel", "Digits", "Metaspace", "Split", "Whitespace", "WhitespaceSplit", "Punctuation", "UnicodeScripts"}
)


def message_gaps(template: ChatTemplate) -> list[str]:
    """What ``template`` writes between the texts of two messages, for each pair of a short chat; [] for a template
    that refuses that chat or does not write its texts one after the other."""
    try:
        text = template.render(_PROBE)
    except InvalidRequest:
        return []
    starts = [text.find(message["content"]) for message in _PROBE]
    if -1 in starts or starts != sorted(starts):
        return []
    ends = [start + len(message["content"]) for start, message in zip(starts, _PROBE, strict=True)]
    return [text[end:start] for end, start in zip(ends, starts[1:], strict=False)]


def boundary_tokens(backend: Backend, gaps: Sequence[str]) -> tuple[str, ...]:
    """The added tokens before which a text may be cut, as few as cut it in each of the ``gaps``: the first in them
    that is in all, else those that are in any. () where it cannot be shown that a cut changes nothing."""
    added = [token for token in backend.get_added_tokens_decoder().values() if not token.normalized]
    if not gaps or not _sees_pieces_only(backend) or any(token.single_word for token in added):
        return ()
    contents = [token.content for token in added]
    found = [
        token.content
        for token in added
        if token.content and any(token.content in gap for gap in gaps)
        if not token.lstrip and not token.content[0].isspace() and _stands_alone(token.content, contents)
    ]
    everywhere = [token for token in found if all(token in gap for gap in gaps)]
    if everywhere:
        return (min(everywhere, key=gaps[0].index),)
    return tuple(sorted(found))


def cut(text: str, tokens: Sequence[str], least: int = MIN_PIECE) -> list[str]:
    """The pieces of ``text``, cut before ``tokens``, none but the last shorter than ``least`` characters.

    A text that begins as another does is cut at the same places as that one, but for the other's last.
    """
    places = _places(text, tokens[0], least) if len(tokens) == 1 else _all_places(text, tokens, least)
    if not places:
        return [text]
    return [text[start:end] for start, end in pairwise([0, *places, len(text)])]


def _places(text: str, token: str, least: int) -> list[int]:
    """Where ``token`` stands, at least ``least`` from the beginning and from the place before."""
    places = []
    place = text.find(token, least)
    while place >= 0:
        places.append(place)
        place = text.find(token, place + least)
    return places


def _all_places(text: str, tokens: Sequence[str], least: int) -> list[int]:
    cuts: list[int] = []
    for place in sorted(place for token in tokens for place in _places(text, token, least)):
        if place - (cuts[-1] if cuts else 0) >= least:
            cuts.append(place)
    return cuts


def _stands_alone(token: str, others: Sequence[str]) -> bool:
    """Whether no added token can take a part of ``token`` where its text stands."""
    for other in others:
        if token[0] not in other[1:]:
            continue  # it can neither hold it, unless it begins with it, nor end in its beginning
        if other != token and token in other:
            return False
        if any(other.endswith(token[:length]) for length in range(1, min(len(token), len(other)))):
            return False
    return not any(other != token and other.startswith(token) for other in others)


def _sees_pieces_only(backend: Backend) -> bool:
    model = backend.model
    if not isinstance(model, models.BPE) or model.dropout:
        return False
    return all(step in _PURE for part in (backend.normalizer, backend.pre_tokenizer) for step in _steps(part))


def _steps(part: Any) -> Iterator[str]:
    """The types of a normalizer's or pre-tokenizer's steps, as the library describes them in JSON."""
    if part is None:
        return
    todo: list[dict[str, Any]] = [json.loads(part.__getstate__())]
    while todo:
        step = todo.pop()
        if step.get("type") == "Sequence":
            todo += step.get("normalizers") or step.get("pretokenizers") or []
        else:
            yield step["type"]
