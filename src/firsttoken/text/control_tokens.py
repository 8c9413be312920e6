"""Which control tokens a chat has is for its template to say, whatever its callers write.

A control token is a special token of the tokenizer, or another added token that the template writes itself, as
``<tool_call>``. Where no text of the caller has a character with which one begins, none can come of it, and the prompt
is tokenised as it stands. Else each such character is given a *twin* before the template sees it: a character that
occurs nowhere in the request, that no template trims, folds or escapes, and that takes as much room. In what the
template then writes, every control token is the template's own. With the twins turned back, the same places say which
tokens to parse; all else is text, and is tokenised by a tokenizer that is blind to control tokens.

A template that ends a text of its own in the middle of a control token, as ``'<|' + role``, is known beforehand: what a
caller writes cannot go on with it.
"""

from __future__ import annotations

import re
import secrets
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from firsttoken.core.errors import CheckpointError, InvalidRequest

Span = tuple[int, int]

# Of one byte in Latin-1, and no blanks: nearly no text has any, and one that has them as twins stays as small.
_FIRST_TWINS = tuple(chr(code) for code in range(0x80, 0xA0) if code != 0x85)
_MORE_TWINS = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class ControlTokens:
    """Those of one tokenizer under one template, which ``writes`` these texts. Safe to use from several threads.

    ``always``: the tokenizer can make control tokens of what only looks like them (its normaliser folds letters), so
    every chat is tokenised apart.
    """

    def __init__(self, backend: Backend, writes: Collection[str]) -> None:
        added = [(index, token) for index, token in backend.get_added_tokens_decoder().items() if token.content]
        found = [
            (index, token)
            for index, token in added
            if token.special or (token.content.strip() and any(token.content in text for text in writes))
        ]
        self._source = backend
        self._tokens = {token.content: (index, token) for index, token in found}
        # What stands for letters that the model does not know is the model's to make.
        unknown = backend.token_to_id(getattr(backend.model, "unk_token", None) or "")
        self._ids = frozenset(index for index, _ in found if index != unknown)
        self._pattern = re.compile(_trie_pattern(self._tokens)) if found else None
        firsts = {content.lstrip()[:1] or content[0] for content in self._tokens}
        self.marks = tuple(
            sorted({form for one in firsts for form in (one, one.lower(), one.upper()) if len(form) == 1})
        )
        self.blank_first = any(content[0].isspace() for content in self._tokens)
        rests = _rests(self._tokens, writes)
        self._rest_pattern = re.compile(_trie_pattern(rests)) if rests else None
        self._rest_beginnings = frozenset(rest[:end] for rest in rests for end in range(1, len(rest) + 1))
        self.always = backend.normalizer is not None and any(
            token.normalized or (index in self._ids and _is_made(backend, index, token.content))
            for index, token in found
        )
        self._written = "".join(writes)
        self._blind: Backend | None = None
        self._anchor = f"\U000f0000{secrets.token_hex(8)}\U000f0000"
        self._lock = Lock()

    def twins(self, texts: Sequence[str]) -> Twins | None:
        """What must stand for characters of these ``texts``, all that a caller sent; None where nothing need. Raises
        `InvalidRequest` when they leave no character to take."""
        if not self._tokens:
            return None
        heads = [text for text in texts if self.goes_on(text)] if self._rest_beginnings else []
        if not (self.always or heads or any(mark in text for mark in self.marks for text in texts)):
            return None
        return Twins(self, heads, _free([self._written, *texts]))

    def goes_on(self, text: str) -> bool:
        """Whether ``text`` could go on with a control token that the template has begun."""
        start = text.strip()
        if not start or self._rest_pattern is None:
            return False
        return start in self._rest_beginnings or self._rest_pattern.match(start) is not None

    def spans(self, text: str) -> list[Span]:
        """Where ``text`` has control tokens: the first from the left, of several there the longest."""
        return [] if self._pattern is None else [match.span() for match in self._pattern.finditer(text)]

    def begins(self, text: str, at: int) -> bool:
        """Whether a control token begins at that place."""
        return self._pattern is not None and self._pattern.match(text, at) is not None

    def harmless(self, text: str) -> bool:
        """Whether tokenising ``text`` makes no control token."""
        return not self.always and not self.spans(text)

    def encode(self, text: str, spans: Sequence[Span] = ()) -> array[int]:
        """Token ids of ``text``, with control tokens at ``spans`` (see `spans`) and nowhere else; nothing is added to
        it. Raises `InvalidRequest` for a
        text that this tokenizer cannot tell from a control token."""
        stretches, controls = self._cut(text, spans)
        found = self._encode_plain(stretches)
        whole = found[0]
        for control, ids in zip(controls, found[1:], strict=True):
            whole.append(control)
            whole += ids
        return whole

    # ------------------------------------------------------------------ inside

    def _cut(self, text: str, spans: Iterable[Span]) -> tuple[list[str], list[int]]:
        """What stands between the tokens, one more than there are, and the tokens."""
        stretches, controls, position = [], [], 0
        for start, end in spans:
            index, token = self._tokens[text[start:end]]
            if token.single_word and (text[start - 1 : start].isalnum() or text[end : end + 1].isalnum()):
                continue
            before = text[position:start]
            stretches.append(before.rstrip() if token.lstrip else before)
            controls.append(index)
            if token.rstrip:
                end += len(text[end:]) - len(text[end:].lstrip())
            position = end
        stretches.append(text[position:])
        return stretches, controls

    def _encode_plain(self, stretches: Sequence[str]) -> list[array[int]]:
        """The first as the beginning of a text, the others as what follows a token."""
        found = self._encode_each(stretches, first=0)
        for number, ids in enumerate(found):
            if not self._ids.isdisjoint(ids):
                found[number] = self._encode_broken(stretches[number], begins=not number)
        return found

    def _encode_broken(self, text: str, *, begins: bool) -> array[int]:
        """``text``, of whose letters the model itself makes a control token: cut inside it."""
        cuts = [0, *(start + 1 for start, _ in self.spans(text)), len(text)]
        parts = [text[start:end] for start, end in pairwise(cuts)]
        ids = array("I")
        for part in self._encode_each(parts, first=0 if begins else -1):
            ids += part
        if not self._ids.isdisjoint(ids):
            name = next(name for name, (index, _) in self._tokens.items() if index in ids)
            raise InvalidRequest(
                f"a text looks to this model's tokenizer like its control token {name!r}, and cannot be told from it: "
                "write it otherwise",
                param="messages",
            )
        return ids

    def _encode_each(self, texts: Sequence[str], *, first: int) -> list[array[int]]:
        """Those after ``first`` as if a token stood before them: some tokenizers ask whether a text begins there."""
        blind = self._blind_backend()
        given = [text if number == first or not text else self._anchor + text for number, text in enumerate(texts)]
        found = [array("I", one.ids) for one in blind.encode_batch_fast(given, add_special_tokens=False)]
        return [ids if number == first else ids[1:] for number, ids in enumerate(found)]

    def _blind_backend(self) -> Backend:
        """The same tokenizer, which finds no control token in a text. It shares the model, so it is made at once: a
        copy by way of JSON would keep the interpreter to itself for half a second."""
        with self._lock:
            if self._blind is None:
                source, blind = self._source, Backend(self._source.model)
                if source.normalizer is not None:
                    blind.normalizer = source.normalizer
                if source.pre_tokenizer is not None:
                    blind.pre_tokenizer = source.pre_tokenizer
                added = sorted(source.get_added_tokens_decoder().items())
                blind.add_tokens([_marked(token, special=token.content in self._tokens) for _, token in added])
                blind.add_tokens([AddedToken(self._anchor, special=False, normalized=False)])
                blind.encode_special_tokens = True
                for index, token in added:
                    if blind.token_to_id(token.content) != index:
                        raise CheckpointError(
                            f"token {token.content!r} would get another id than {index} when it is added again"
                        )
                self._blind = blind
            return self._blind


def _marked(token: AddedToken, *, special: bool) -> AddedToken:
    return AddedToken(
        token.content,
        special=special,
        normalized=token.normalized,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
    )


class Twins:
    """The twins in one request. `opaque` hides from the template what a text has; a text that was made by `seen` is
    found by a template that looks for it (`needle`, `shown`), as for ``</think>`` in an answer of the model's."""

    def __init__(self, controls: ControlTokens, heads: Iterable[str], free: Iterator[str]) -> None:
        self._controls = controls
        self._opaque = [(mark, next(free)) for mark in controls.marks]
        self._seen = [(mark, next(free)) for mark in controls.marks]
        first = sorted({text.strip()[0] for text in heads} - set(controls.marks))
        self._heads = {mark: next(free) for mark in first}
        pairs = [*self._opaque, *self._seen, *self._heads.items()]
        self._back = [(twin, mark) for mark, twin in pairs]
        self.characters = "".join(twin for twin, _ in self._back)
        shown = [*self._seen, *self._heads.items()]
        self._shown = [(twin, mark) for mark, twin in shown]

    def opaque(self, text: str) -> str:
        return _replaced(self._without_head(text), self._opaque)

    def seen(self, text: str) -> str:
        return _replaced(self._without_head(text), self._seen)

    def name(self, text: str) -> str:
        """As `opaque`, for the name of a field: those of JSON schemas are the template's to look for."""
        return _replaced(text if text in _SCHEMA_WORDS else self._without_head(text), self._opaque)

    def back(self, text: str) -> str:
        """As the caller wrote it."""
        return _replaced(text, self._back)

    def shown(self, text: str) -> str:
        """With what a template may look for as the caller wrote it."""
        return _replaced(text, self._shown)

    def needle(self, text: str, place: str) -> str:
        """What to look for in ``place`` to find ``text`` there."""
        return _replaced(text, self._seen) if any(twin in place for _, twin in self._seen) else text

    def hides(self, written: str, text: str) -> bool:
        """Whether ``text``, which is ``written`` without twins, has control tokens that ``written`` has not."""
        controls = self._controls
        if self._heads or controls.blank_first:
            return controls.spans(text) != controls.spans(written)
        for twin, _ in self._back:
            at = written.find(twin)
            while at >= 0:
                if controls.begins(text, at):
                    return True
                at = written.find(twin, at + 1)
        return False

    def _without_head(self, text: str) -> str:
        if not self._heads or not self._controls.goes_on(text):
            return text
        at = len(text) - len(text.lstrip())
        twin = self._heads.get(text[at])
        return text if twin is None else text[:at] + twin + text[at + 1 :]


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a template wrote. ``guarded`` is None where its tokens are those of ``text`` as it stands; else it is the
    same text, place by place, with ``twins`` for characters that are the caller's: what are control tokens in
    ``guarded`` are those of the prompt."""

    text: str
    guarded: str | None = None
    twins: str = ""

    @classmethod
    def of(cls, written: str, twins: Twins, controls: ControlTokens) -> Rendered:
        text = twins.back(written)
        if controls.always or twins.hides(written, text):
            return cls(text, written, twins.characters)
        return cls(text)


_SCHEMA_WORDS = frozenset(
    {"type", "function", "name", "description", "parameters", "properties", "required", "items", "enum", "default"}
    | {"arguments", "strict", "return", "format", "title", "anyOf", "oneOf", "allOf", "additionalProperties", "id"}
)


def _replaced(text: str, pairs: Iterable[tuple[str, str]]) -> str:
    for old, new in pairs:
        if old in text:
            text = text.replace(old, new)
    return text


def _free(texts: Sequence[str]) -> Iterator[str]:
    """Characters that are in none of ``texts``. Raises `InvalidRequest` when there are no more."""
    others = [text for text in texts if not text.isascii()]
    for one in _FIRST_TWINS:
        if not any(one in text for text in others):
            yield one
    taken = set().union(*others)
    for codes in _MORE_TWINS:
        yield from (chr(code) for code in codes if chr(code) not in taken)
    raise InvalidRequest("the messages leave no character of the private use areas unused", param="messages")


def _rests(tokens: Collection[str], writes: Iterable[str]) -> set[str]:
    """What is left of the control tokens in the middle of which one of the texts that a template writes ends."""
    found = set()
    by_first: dict[str, list[str]] = {}
    for token in tokens:
        by_first.setdefault(token[0], []).append(token)
    longest = max(map(len, tokens), default=0)
    for text in set(writes):
        for at in range(max(0, len(text) - longest + 1), len(text)):
            tail = text[at:]
            found |= {one[len(tail) :] for one in by_first.get(tail[0], ()) if one != tail and one.startswith(tail)}
    return found


def _is_made(backend: Backend, index: int, text: str) -> bool:
    """Whether the model makes the token of the letters of its name."""
    text = backend.normalizer.normalize_str(text)
    before = backend.pre_tokenizer
    pieces = [text] if before is None else [piece for piece, _ in before.pre_tokenize_str(text)]
    return any(token.id == index for piece in pieces for token in backend.model.tokenize(piece))


class _Node(dict[str, "_Node"]):
    ends = False


def _trie_pattern(words: Iterable[str]) -> str:
    """A regular expression for any of ``words``, the longest at a place: in the time of its length, however many
    there are."""
    root = _Node()
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, _Node())
        node.ends = True
    return _branches(root)


def _branches(node: _Node) -> str:
    """As deep as words branch, or end inside others."""
    alone = ""
    while len(node) == 1 and not node.ends:
        ((character, node),) = node.items()
        alone += re.escape(character)
    if not node:
        return alone
    parts = [re.escape(character) + _branches(child) for character, child in sorted(node.items())]
    return f"{alone}(?:{'|'.join(parts)}){'?' if node.ends else ''}"
