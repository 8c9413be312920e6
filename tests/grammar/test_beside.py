"""Rows whose masks are made on other threads."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from firsttoken.core.errors import ConstraintFailed
from firsttoken.core.grammar import Grammar
from firsttoken.grammar import beside
from firsttoken.grammar.beside import BesideRow, Maskers
from firsttoken.grammar.row import GrammarRow

NUMBER = Grammar("regex", "[0-9]{3}")


@pytest.fixture
def maskers():
    made = Maskers(2)
    yield made
    made.close()
    for thread in made._threads:
        thread.join(5)
        assert not thread.is_alive()


def test_it_says_what_a_row_says_and_the_masks_are_made_elsewhere(answers, maskers, monkeypatch):
    makers = []
    make = GrammarRow._make_mask
    monkeypatch.setattr(GrammarRow, "_make_mask", lambda row: makers.append(threading.current_thread()) or make(row))
    row = BesideRow(answers.row(NUMBER, 10), maskers)
    alone = answers.row(NUMBER, 10)
    for token in b"123":
        assert row.may_refuse == alone.may_refuse
        assert (row.mask() == alone.mask()).all()
        assert row.take(token)
        assert alone.take(token)
    assert row.take_way_out() == alone.take_way_out()
    assert makers.count(threading.current_thread()) == 3  # of the one that is alone


def test_the_rows_of_a_step_wake_no_more_threads_than_there_are(answers, maskers, monkeypatch):
    """To hand each row over by itself took the thread that looks after the step 50 us a row."""
    rows = [BesideRow(answers.row(NUMBER, 10), maskers) for _ in range(9)]
    maskers.begin()
    assert all(row.mask().any() for row in rows), "all are made: to take a token begins nothing"
    for row in rows:
        assert row.take(ord("1"))
    handed = []
    queue = maskers._queue
    monkeypatch.setattr(maskers, "_queue", SimpleNamespace(put=lambda work: handed.append(work) or queue.put(work)))
    maskers.begin()
    maskers.begin()  # there is nothing new
    assert [work is handed[0] for work in handed] == [True, True]
    monkeypatch.undo()
    assert all(row.mask().any() for row in rows)


def test_a_mask_that_takes_long_keeps_no_other_row(answers, maskers, monkeypatch):
    go_on, slow = threading.Event(), answers.row(NUMBER, 10)
    prepare = GrammarRow.prepare
    monkeypatch.setattr(GrammarRow, "prepare", lambda row: go_on.wait(5) if row is slow else prepare(row))
    first = BesideRow(slow, maskers)
    others = [BesideRow(answers.row(NUMBER, 10), maskers) for _ in range(5)]
    maskers.begin()
    assert all(row.mask().any() for row in others)
    go_on.set()
    assert first.mask().any()


def test_what_a_thread_met_is_raised_by_who_asks(answers, maskers, monkeypatch):
    monkeypatch.setattr(GrammarRow, "prepare", lambda row: 1 / 0)
    row = BesideRow(answers.row(NUMBER, 10), maskers)
    with pytest.raises(ZeroDivisionError):
        row.mask()


def test_a_mask_that_is_late_ends_its_answer_and_a_wait(answers, maskers, monkeypatch):
    monkeypatch.setattr(beside, "_MASK_S", 0.01)
    go_on = threading.Event()
    monkeypatch.setattr(GrammarRow, "prepare", lambda row: go_on.wait(5))
    row = BesideRow(answers.row(NUMBER, 10), maskers)
    with pytest.raises(ConstraintFailed, match="too complex"):
        row.mask()
    go_on.set()
    with pytest.raises(ConstraintFailed, match="too complex"):  # though it may have come by now
        row.take(ord("1"))
