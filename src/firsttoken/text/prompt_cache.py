"""Tier L1: pieces of rendered prompts and their tokens in host memory, so that what was tokenised is not again.

A chat's turn begins with all turns before it, and many chats with the same system prompt. A rendered prompt is cut
before tokens that stand between messages (`boundaries`), and each piece is looked up by its text: compared as a whole,
never trusted to a hash. Only pieces that are not found are tokenised.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock

from firsttoken.core.clock import NS_PER_S, now_ns
from firsttoken.text.boundaries import MIN_PIECE, cut
from firsttoken.text.control_tokens import ControlTokens, Rendered, Span
from firsttoken.text.tokenizer import Tokenizer

CAPACITY = 64 << 20
"""Bytes of texts and tokens; two hundred chats of 32k tokens in ASCII."""
TTL_NS = 60 * NS_PER_S
"""How long a piece is kept after its last use. The next turn of a chat that is read and answered comes within."""
SHORT = 768
"""Characters below which a text is tokenised as it is, which takes some 0.15 ms: to look for one that is new and to
keep it takes a tenth of that."""

_ENTRY_BYTES = 400  # of the objects around a text and its ids
_LARGEST = 4  # a piece may take this part of the capacity
_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class PromptCacheStats:
    """Totals since the start, but for ``entries`` and ``bytes``, which are held now (``bytes`` with what was loaded).
    ``hits`` and ``misses`` count pieces, the ``characters`` are those of their texts."""

    hits: int
    misses: int
    hit_characters: int
    missed_characters: int
    evicted: int
    expired: int
    entries: int
    bytes: int


@dataclass(slots=True)
class _Entry:
    ids: array[int]
    size: int
    used_ns: int = 0


# Under which salt, what text, and with which twins (`control_tokens`): "" where it is tokenised as it stands.
_Key = tuple[str, str, str]


@dataclass(slots=True)
class Found:
    """A text's pieces, and the ids of those that are known; ``missing`` are the texts of the others."""

    salt: str
    ids: list[array[int] | None]
    missing: list[str]


class PromptCache:
    """Least recently used leaves first. Safe to use from several threads: tokenising is done outside the lock.

    A piece is found only by the ``salt`` under which it was stored, since how long a prompt takes would tell a caller
    what others have sent; what `load` was given is found by all. Its texts are in memory alone.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        boundaries: Sequence[str],
        *,
        capacity: int = CAPACITY,
        ttl_ns: int = TTL_NS,
        clock: Callable[[], int] = now_ns,
    ) -> None:
        self._tokenizer = tokenizer
        self._boundaries = tuple(boundaries)
        self._capacity = capacity
        self._ttl_ns = ttl_ns
        self._clock = clock
        self._lock = Lock()
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._shared: dict[str, array[int]] = {}
        self._bytes = 0
        self._shared_bytes = 0
        self._hits = self._misses = self._hit_characters = self._missed_characters = 0
        self._evicted = self._expired = 0

    def load(self, texts: Iterable[str]) -> None:
        """Keep the pieces of ``texts`` for all salts and for ever, whatever the capacity. Before the first `encode`."""
        for text in texts:
            pieces = [piece for piece in cut(text, self._boundaries) if len(piece) >= MIN_PIECE]
            for piece, ids in zip(pieces, self._tokenizer.encode_each(pieces), strict=True):
                if piece not in self._shared:
                    self._shared[piece] = ids
                    self._shared_bytes += _size(piece, ids)

    def loaded(self, text: str) -> int:
        """How many of the characters of ``text`` are in pieces that `load` was given."""
        return sum(len(piece) for piece in cut(text, self._boundaries) if piece in self._shared)

    def encode(self, text: str, salt: str = "") -> array[int]:
        """The ids of ``text`` as ``tokenizer.encode(text, add_special_tokens=False)`` gives them. Raises
        `InvalidRequest` when it is not valid Unicode."""
        if len(text) < SHORT:
            return self._tokenizer.encode(text, add_special_tokens=False)
        return self.complete(self.look_up(text, salt))

    def look_up(self, text: str, salt: str = "") -> Found:
        """What is known of ``text``. A matter of a nanosecond or two a character."""
        return self._look_up(cut(text, self._boundaries), salt)

    def _look_up(self, pieces: Sequence[str], salt: str) -> Found:
        ids: list[array[int] | None] = []
        missing = []
        with self._lock:
            now = self._clock()
            self._drop_expired(now, _AT_ONCE)
            for piece in pieces:
                known = self._known((salt, piece, ""), now) if len(piece) >= MIN_PIECE else None
                ids.append(known)
                self._count(len(piece), known is not None)
                if known is None:
                    missing.append(piece)
        return Found(salt, ids, missing)

    def complete(self, found: Found) -> array[int]:
        """The ids of the whole; tokenises what is missing, and keeps it."""
        new = self._tokenizer.encode_each(found.missing) if found.missing else []
        self._store([(found.salt, piece, "") for piece in found.missing], new)
        rest = iter(new)
        whole: array[int] = array("I")
        for ids in found.ids:
            whole += next(rest) if ids is None else ids
        return whole

    def encode_apart(self, rendered: Rendered, controls: ControlTokens, salt: str = "") -> array[int]:
        """The ids of a prompt in which not all that look like control tokens are. A piece in which they are is found
        by other prompts too."""
        guarded = rendered.guarded or rendered.text
        whole: array[int] = array("I")
        start = 0
        for piece in cut(guarded, self._boundaries):
            text = rendered.text[start : start + len(piece)]
            start += len(piece)
            spans = controls.spans(piece)
            if not controls.always and spans == controls.spans(text):
                whole += self.complete(self._look_up([text], salt))
            else:
                whole += self._piece_apart((salt, piece, rendered.twins), text, spans, controls)
        return whole

    def _piece_apart(self, key: _Key, text: str, spans: Sequence[Span], controls: ControlTokens) -> array[int]:
        with self._lock:
            known = self._known(key, self._clock()) if len(text) >= MIN_PIECE else None
            self._count(len(text), known is not None)
        if known is None:
            known = controls.encode(text, spans)
            self._store([key], [known])
        return known

    def drop_expired(self) -> int:
        """Let go of what was not used for the TTL, a few pieces at a time; returns how many there are left."""
        while True:
            with self._lock:
                if self._drop_expired(self._clock(), _AT_ONCE) < _AT_ONCE:
                    return len(self._entries)

    def stats(self) -> PromptCacheStats:
        with self._lock:
            return PromptCacheStats(
                hits=self._hits,
                misses=self._misses,
                hit_characters=self._hit_characters,
                missed_characters=self._missed_characters,
                evicted=self._evicted,
                expired=self._expired,
                entries=len(self._entries) + len(self._shared),
                bytes=self._bytes + self._shared_bytes,
            )

    def _store(self, keys: Sequence[_Key], made: Sequence[array[int]]) -> None:
        entries = [
            (key, _Entry(ids, _size(key[1], ids)))
            for key, ids in zip(keys, made, strict=True)
            if len(key[1]) >= MIN_PIECE
        ]
        if not entries:
            return
        with self._lock:
            now = self._clock()
            for key, entry in entries:
                if entry.size * _LARGEST > self._capacity:
                    continue
                before = self._entries.pop(key, None)  # expired, or stored by another thread meanwhile
                self._bytes += entry.size - (before.size if before is not None else 0)
                entry.used_ns = now
                self._entries[key] = entry
        self._make_room()

    def _make_room(self) -> None:
        """A few pieces at a time: a large one may push out thousands, and the event loop waits for the lock too."""
        while True:
            with self._lock:
                for _ in range(_AT_ONCE):
                    if self._bytes <= self._capacity:
                        return
                    self._bytes -= self._entries.popitem(last=False)[1].size
                    self._evicted += 1

    # ------------------------------------------------------------ under the lock

    def _count(self, characters: int, hit: bool) -> None:
        if hit:
            self._hits += 1
            self._hit_characters += characters
        else:
            self._misses += 1
            self._missed_characters += characters

    def _known(self, key: _Key, now: int) -> array[int] | None:
        entry = self._entries.get(key)
        if entry is None:
            return None if key[2] else self._shared.get(key[1])
        if now - entry.used_ns > self._ttl_ns:
            return None
        entry.used_ns = now
        self._entries.move_to_end(key)
        return entry.ids

    def _drop_expired(self, now: int, most: int) -> int:
        """Of the oldest, ``most`` at once; returns how many went."""
        entries, dropped = self._entries, 0
        while dropped < most and entries and now - next(iter(entries.values())).used_ns > self._ttl_ns:
            self._bytes -= entries.popitem(last=False)[1].size
            self._expired += 1
            dropped += 1
        return dropped


def _size(text: str, ids: array[int]) -> int:
    return sys.getsizeof(text) + len(ids) * ids.itemsize + _ENTRY_BYTES
