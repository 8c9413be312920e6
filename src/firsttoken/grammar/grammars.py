"""The grammars of one engine: compiled beside it, kept for the next request, and their answers.

Light to import and to make. The library and the vocabulary's tables, which take a second, come with the first grammar.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.core.errors import InvalidRequest
from firsttoken.core.grammar import Grammar
from firsttoken.core.plan import RowStart

if TYPE_CHECKING:
    from firsttoken.grammar.compiled import Compiled
    from firsttoken.grammar.row import GrammarRow
    from firsttoken.grammar.tokens import TokenTable

# Those that were used last. One takes from 100 kB to some 40 MB.
KEPT = 64
_MASK_WORKERS = 4


class Grammars:
    """All methods are for the engine's own threads: `ask` for its loop, `row` for the one that samples. ``load`` is
    called once, by a thread of this object's."""

    def __init__(self, load: Callable[[], TokenTable]) -> None:
        self._load = load
        self._table: TokenTable | None = None
        self._found: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()
        self._compiler: ThreadPoolExecutor | None = None
        self._maskers: ThreadPoolExecutor | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Grammars:
        """Of a model's own vocabulary."""
        return cls(lambda: _table_of(checkpoint))

    def ask(self, grammar: Grammar) -> Future[Compiled]:
        """The compiled grammar, now or soon; raises `InvalidRequest` from its result for one that cannot be used."""
        found = self._found.get(grammar)
        if found is not None:
            self._found.move_to_end(grammar)
            return found
        if self._compiler is None:
            self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar-compile")
        future = self._found[grammar] = self._compiler.submit(self._compile, grammar)
        while len(self._found) > KEPT:
            self._found.popitem(last=False)
        return future

    def row(self, start: RowStart) -> GrammarRow:
        """The answer of a row that starts. Its grammar has been asked for, and may be once more: it is waited for."""
        from firsttoken.grammar.row import GrammarRow

        grammar = start.params.grammar
        assert grammar is not None, "a row without a grammar is held to none"
        if self._maskers is None:
            self._maskers = ThreadPoolExecutor(
                min(_MASK_WORKERS, os.cpu_count() or 1), thread_name_prefix="grammar-mask"
            )
        known = np.frombuffer(start.tokens, dtype="<u4")
        params = start.params
        return GrammarRow(
            self.ask(grammar).result(),
            known[start.num_prompt :].tolist(),
            start.max_tokens,
            start.max_tokens if params.ignore_eos else params.min_tokens,
            start.stop_ids if params.min_tokens else (),
            self._maskers,
        )

    def close(self) -> None:
        """Let the threads go."""
        for pool in (self._compiler, self._maskers):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> Compiled:
        from firsttoken.grammar.compiled import Compiled

        if self._table is None:
            self._table = self._load()
        return Compiled(grammar, self._table)


def row_of(grammars: Grammars | None, start: RowStart) -> GrammarRow | None:
    """What a row that starts is held to, None for a row without a grammar."""
    if start.params.grammar is None:
        return None
    if grammars is None:
        raise RuntimeError("a row has a grammar, and the executor was told of no grammars")
    return grammars.row(start)


def _table_of(checkpoint: Checkpoint) -> TokenTable:
    from firsttoken.grammar.tokens import TokenTable
    from firsttoken.text.tokenizer import Tokenizer

    if checkpoint.tokenizer is None:
        raise InvalidRequest("this model has no tokenizer, so an answer cannot be held to a grammar", param="grammar")
    tokenizer = Tokenizer.build(checkpoint.tokenizer)
    return TokenTable(tokenizer, checkpoint.generation.eos_token_ids, checkpoint.config.vocab_size)
