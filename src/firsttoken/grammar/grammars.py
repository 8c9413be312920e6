"""The grammars of one engine: compiled beside it, kept for the next request, and their answers.

Light to import and to make. The library and the vocabulary's tables, which take a second, come with the first grammar,
or before it when there is nothing else to do (`prepare`).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.core.errors import InvalidRequest
from firsttoken.core.grammar import Grammar
from firsttoken.core.plan import RowStart

if TYPE_CHECKING:
    from firsttoken.grammar.beside import BesideRow, Maskers
    from firsttoken.grammar.compiled import Compiled
    from firsttoken.grammar.row import GrammarRow
    from firsttoken.grammar.tokens import TokenTable

# Those that were used last: so many at most, and so many bytes of them. One takes from 100 kB to some 40 MB.
KEPT = 64
KEPT_BYTES = 512_000_000
_MASK_WORKERS = 4


_T = TypeVar("_T")
Verdict: TypeAlias = "Compiled | InvalidRequest"
"""What became of a grammar: what answers are held to, or why it cannot be used."""


class Grammars:
    """``load`` is called once, by a thread of this object's. What was compiled is found while it is one of those
    that were used last (`KEPT`, `KEPT_BYTES`), or held by anyone. For any thread."""

    def __init__(self, load: Callable[[], TokenTable]) -> None:
        self._load = load
        self._table: TokenTable | None = None
        self._lock = Lock()  # of the next three
        self._kept: OrderedDict[Grammar, Verdict] = OrderedDict()
        self._kept_bytes = 0  # of all of them
        self._held: WeakValueDictionary[Grammar, Compiled] = WeakValueDictionary()
        self._compiler: ThreadPoolExecutor | None = None
        self._maskers: Maskers | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Grammars:
        """Of a model's own vocabulary."""
        return cls(lambda: _table_of(checkpoint))

    def known(self, grammar: Grammar) -> Verdict | None:
        """What became of a grammar that was compiled; None where that is not known, or not any more."""
        with self._lock:
            verdict = self._kept.get(grammar) or self._held.get(grammar)
            if verdict is not None:
                self._keep(grammar, verdict)
            return verdict

    def prepare(self) -> None:
        """Have the vocabulary read on a thread, if it was not: it keeps the interpreter for a tenth of a second."""
        if self._compiler is None:
            self._on_thread(self._read)

    def compile(self, grammar: Grammar) -> Future[Verdict]:
        """Soon what becomes of it; it is `known` from then on."""
        return self._on_thread(lambda: self._compile(grammar))

    def _on_thread(self, work: Callable[[], _T]) -> Future[_T]:
        if self._compiler is None:
            self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar-compile")
        return self._compiler.submit(work)

    def _read(self) -> None:
        with suppress(InvalidRequest):  # of a model that holds no answers to grammars; a request is told
            self._table = self._load()

    def row(self, start: RowStart) -> GrammarRow:
        """The answer of a row that starts. Its grammar is known where the request holds it; else it is compiled, and
        waited for. Raises `InvalidRequest` for one that cannot be used."""
        from firsttoken.grammar.row import GrammarRow

        grammar = start.params.grammar
        assert grammar is not None, "a row without a grammar is held to none"
        compiled = self.known(grammar) or self.compile(grammar).result()
        if isinstance(compiled, InvalidRequest):
            raise compiled
        known = np.frombuffer(start.tokens, dtype="<u4")
        params = start.params
        return GrammarRow(
            compiled,
            known[start.num_prompt :].tolist(),
            start.max_tokens,
            start.max_tokens if params.ignore_eos else params.min_tokens,
            start.stop_ids if params.min_tokens else (),
        )

    def row_beside(self, start: RowStart) -> BesideRow:
        """The same, with masks that are made on threads of this object's once they are told to (`begin_masks`)."""
        from firsttoken.grammar.beside import BesideRow, Maskers

        if self._maskers is None:
            self._maskers = Maskers(min(_MASK_WORKERS, os.cpu_count() or 1))
        return BesideRow(self.row(start), self._maskers)

    def begin_masks(self) -> None:
        """All rows beside that took a token are to have their next masks made."""
        if self._maskers is not None:
            self._maskers.begin()

    def close(self) -> None:
        """Let the threads go."""
        if self._compiler is not None:
            self._compiler.shutdown(wait=False, cancel_futures=True)
        if self._maskers is not None:
            self._maskers.close()

    def _compile(self, grammar: Grammar) -> Verdict:
        from firsttoken.grammar.compiled import Compiled

        try:
            if self._table is None:
                self._table = self._load()
            verdict: Verdict = Compiled(grammar, self._table)
        except InvalidRequest as error:
            # Not itself: its traceback would keep all that was made until then, which may be tens of megabytes.
            verdict = InvalidRequest(error.message, param=error.param, code=error.code)
        with self._lock:
            self._keep(grammar, verdict)
        return verdict

    def _keep(self, grammar: Grammar, verdict: Verdict) -> None:
        before = self._kept.get(grammar)
        self._kept_bytes += _size(grammar, verdict) - (0 if before is None else _size(grammar, before))
        self._kept[grammar] = verdict
        self._kept.move_to_end(grammar)
        if not isinstance(verdict, InvalidRequest):
            self._held[grammar] = verdict
        while len(self._kept) > KEPT or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= _size(*self._kept.popitem(last=False))


def _size(grammar: Grammar, verdict: Verdict) -> int:
    """Bytes of both."""
    return len(grammar.source) + (0 if isinstance(verdict, InvalidRequest) else verdict.nbytes)


def row_of(grammars: Grammars | None, start: RowStart) -> GrammarRow | None:
    """What a row that starts is held to, None for a row without a grammar. Its masks are made by who asks for them."""
    return None if start.params.grammar is None else _told(grammars).row(start)


def row_beside_of(grammars: Grammars | None, start: RowStart) -> BesideRow | None:
    """The same for an executor whose threads have nothing to do while the device computes."""
    return None if start.params.grammar is None else _told(grammars).row_beside(start)


def _told(grammars: Grammars | None) -> Grammars:
    if grammars is None:
        raise RuntimeError("a row has a grammar, and the executor was told of no grammars")
    return grammars


def _table_of(checkpoint: Checkpoint) -> TokenTable:
    from firsttoken.grammar.tokens import TokenTable
    from firsttoken.text.tokenizer import Tokenizer

    if checkpoint.tokenizer is None:
        raise InvalidRequest("this model has no tokenizer, so an answer cannot be held to a grammar", param="grammar")
    tokenizer = Tokenizer.build(checkpoint.tokenizer)
    return TokenTable(tokenizer, checkpoint.generation.eos_token_ids, checkpoint.config.vocab_size)
