"""Who waits for which grammar: by hand, with grammars that are done when the test says so."""

from __future__ import annotations

import gc
import json
import threading
from concurrent.futures import Future

import pytest

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.grammar import Grammar
from firsttoken.core.request import EngineRequest, Request
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.engine import grammar_gate
from firsttoken.engine.grammar_gate import GrammarGate
from firsttoken.grammar import grammars as grammars_module
from firsttoken.grammar import memory
from firsttoken.grammar.grammars import KEPT, Grammars
from firsttoken.grammar.tokens import TokenTable
from tests.grammar.conftest import END, VOCAB, Spelling
from tests.support.scripted_engine import count_up


class Compiled:
    nbytes = 1_000_000

    def check_room(self, max_tokens: int) -> None:
        if max_tokens < 5:
            raise InvalidRequest("too few", param="max_tokens")


class ByHand:
    """Grammars of which each is compiled when the test says so, and forgotten at once."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Future]] = []

    def known(self, grammar: Grammar) -> None:
        return None

    def compile(self, grammar: Grammar) -> Future:
        self.asked.append((grammar.source, Future()))
        return self.asked[-1][1]

    def end(self, verdict: object = None) -> str:
        source, future = self.asked[-1]
        future.set_result(verdict or Compiled())
        return source


def request(id_: int, source: str, tenant: str = "", service: int = 2, **fields: object) -> Request:
    params = SamplingParams(grammar=Grammar("regex", source))
    wire = EngineRequest(
        id=id_,
        prompt=b"\0\0\0\0",
        params=params,
        seed=1,
        tenant=tenant,
        service=service,
        **{"max_tokens": 50, **fields},
    )
    return Request(wire)


def gate_with(*requests: Request) -> tuple[GrammarGate, ByHand]:
    grammars = ByHand()
    gate = GrammarGate(grammars)  # type: ignore[arg-type]
    for one in requests:
        assert gate.keeps(one)
    return gate, grammars


def test_more_that_wait_than_are_kept_are_each_compiled_once():
    """Each was asked for again in each turn of the loop, and none was ever found."""
    many = 3 * KEPT
    gate, grammars = gate_with(*[request(id_, f"a{id_}") for id_ in range(many)])
    released = []
    while len(gate):
        assert list(gate.released()) == []  # and nothing is asked for while one is being made
        grammars.end()
        released += [(one.request_id, error) for one, error in gate.released()]
    assert released == [(id_, None) for id_ in range(many)]
    assert len(grammars.asked) == many


def test_who_sends_many_does_not_hold_back_others_and_better_classes_go_first():
    mine = [request(id_, f"slow{id_}", "many") for id_ in range(20)]
    gate, grammars = gate_with(*mine, request(20, "other", "few"), request(21, "best", "many", service=0))
    order = [grammars.end()]
    for _ in range(3):
        list(gate.released())
        order.append(grammars.end())
    assert order == ["slow0", "best", "other", "slow1"]


def test_nothing_is_compiled_for_who_has_left():
    gate, grammars = gate_with(*[request(id_, f"a{id_}") for id_ in range(5)])
    for id_ in range(4):
        assert gate.drop(id_) is not None
    grammars.end()
    assert list(gate.released()) == []
    assert [source for source, _ in grammars.asked] == ["a0", "a4"]


def test_one_grammar_releases_all_that_wait_for_it_each_by_its_own_room():
    gate, grammars = gate_with(request(1, "a"), request(2, "b"), request(3, "a", max_tokens=2))
    grammars.end()
    released = {one.request_id: error and error.param for one, error in gate.released()}
    assert released == {1: None, 3: "max_tokens"}
    grammars.end(InvalidRequest("no", param="grammar", code="unsupported_grammar"))
    [(one, error)] = gate.released()
    assert (one.request_id, error and error.code, len(gate)) == (2, "unsupported_grammar", 0)


def test_a_deadline_is_not_waited_beyond():
    gate, grammars = gate_with(request(1, "a"), request(2, "b", deadline_ns=1), request(3, "c"))
    assert [(one.request_id, error) for one, error in gate.released()] == [(2, None)]
    assert [source for source, _ in grammars.asked] == ["a"]


def test_requests_that_live_bound_what_is_compiled_for_their_class(monkeypatch):
    monkeypatch.setattr(grammar_gate, "MOST_HELD", 2)
    gate, grammars = gate_with(*[request(id_, f"a{id_}") for id_ in range(3)], request(3, "b", service=1))
    living = []
    for _ in range(3):
        grammars.end()
        living += [one for one, _ in gate.released()]
    assert [source for source, _ in grammars.asked] == ["a0", "b", "a1"]
    del living[0]
    gc.collect()
    list(gate.released())
    assert grammars.asked[-1][0] == "a2"


def test_so_do_their_bytes(monkeypatch):
    monkeypatch.setattr(grammar_gate, "MOST_HELD_BYTES", 2 * Compiled.nbytes)
    gate, grammars = gate_with(*[request(id_, f"a{id_}") for id_ in range(3)])
    living = []
    for _ in range(2):
        grammars.end()
        living += [one for one, _ in gate.released()]
    assert [source for source, _ in grammars.asked] == ["a0", "a1"]
    del living[0]
    gc.collect()
    list(gate.released())
    assert grammars.asked[-1][0] == "a2"


@pytest.fixture(scope="module")
def real():
    made = Grammars(lambda: TokenTable(Spelling(), (END,), VOCAB))
    yield made
    made.close()


def test_what_a_request_holds_is_found_however_many_come_after_it(real):
    first = Grammar("regex", "first")
    held = real.compile(first).result()
    assert real.known(first) is held
    for number in range(KEPT):
        real.compile(Grammar("regex", f"other{number}")).result()
    assert real.known(first) is held
    del held


def test_bytes_bound_what_is_kept_as_its_number_does(monkeypatch):
    made = Grammars(lambda: TokenTable(Spelling(), (END,), VOCAB))
    one, two, three = (Grammar("choice", json.dumps([name])) for name in ("one", "two", "three"))
    # Some 3 MB, and so little that what other threads allocate meanwhile changes nothing here.
    large = Grammar("choice", json.dumps([f"{number:05d}" * 4 for number in range(4000)]))
    taken = made.compile(large).result().nbytes
    assert 1_000_000 + memory.GROWTH < taken <= memory.MOST
    monkeypatch.setattr(grammars_module, "KEPT_BYTES", taken + 2 * (memory.LEAST + memory.GROWTH))
    for grammar in (one, two, large, three):
        made.compile(grammar).result()
    kept = [grammar for grammar in (one, two, large, three) if made.known(grammar) is not None]
    assert kept == [large, three]
    made.close()


def test_a_refusal_keeps_nothing_of_what_was_made_for_it(real):
    """Sixty refused grammars took two gigabytes, by the frames of their tracebacks."""
    verdict = real.compile(Grammar("regex", "(?=x)")).result()
    assert isinstance(verdict, InvalidRequest)
    assert (verdict.code, verdict.__traceback__, verdict.__context__) == ("unsupported_grammar", None, None)


class Prepared(ByHand):
    def __init__(self) -> None:
        super().__init__()
        self.prepared = 0

    def prepare(self) -> None:
        self.prepared += 1


def test_the_vocabulary_is_read_when_there_has_been_nothing_to_do_for_a_while(monkeypatch):
    now = 10 * grammar_gate.REST_NS
    monkeypatch.setattr(grammar_gate, "now_ns", lambda: now)
    grammars = Prepared()
    gate = GrammarGate(grammars, ahead=True)  # type: ignore[arg-type]
    gate.rest(0)
    assert not grammars.prepared  # whoever waited for the engine comes now
    now += grammar_gate.REST_NS
    gate.rest(now - 1)
    assert not grammars.prepared  # an answer has just ended, and the next one may follow
    gate.rest(now - grammar_gate.REST_NS)
    gate.rest(0)
    assert grammars.prepared == 1
    other = GrammarGate(grammars)  # type: ignore[arg-type]
    now += grammar_gate.REST_NS
    other.rest(0)
    assert grammars.prepared == 1


def test_what_was_read_ahead_is_what_grammars_are_compiled_with():
    read = []

    def load() -> TokenTable:
        read.append(TokenTable(Spelling(), (END,), VOCAB))
        return read[-1]

    grammars = Grammars(load)
    grammars.prepare()
    grammars.prepare()
    verdict = grammars.compile(Grammar("regex", "a+")).result(10)
    grammars.prepare()
    assert len(read) == 1
    assert verdict.table is read[0]
    grammars.close()


def test_a_model_that_holds_nothing_to_grammars_says_so_to_the_request_and_not_before():
    grammars = Grammars(lambda: TokenTable(Spelling(), (), VOCAB))
    grammars.prepare()
    verdict = grammars.compile(Grammar("regex", "a+")).result(10)
    assert isinstance(verdict, InvalidRequest)
    assert "no end token" in verdict.message
    grammars.close()


def test_an_idle_engine_reads_it(start, monkeypatch):
    monkeypatch.setattr(grammar_gate, "REST_NS", 0)
    read = threading.Event()
    grammars = Grammars(lambda: read.set() or TokenTable(Spelling(), (END,), VOCAB))
    start(count_up, grammars=grammars)
    assert read.wait(5)
