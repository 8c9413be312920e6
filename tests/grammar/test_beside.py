"""Rows whose masks are made on another thread."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from firsttoken.core.errors import ConstraintFailed
from firsttoken.core.grammar import Grammar
from firsttoken.grammar import beside
from firsttoken.grammar.beside import BesideRow
from firsttoken.grammar.row import GrammarRow

NUMBER = Grammar("regex", "[0-9]{3}")


@pytest.fixture(scope="module")
def workers():
    with ThreadPoolExecutor(1) as made:
        yield made


def test_it_says_what_a_row_says_and_the_masks_are_made_elsewhere(answers, workers, monkeypatch):
    makers = []
    make = GrammarRow._make_mask
    monkeypatch.setattr(GrammarRow, "_make_mask", lambda row: makers.append(threading.current_thread()) or make(row))
    row = BesideRow(answers.row(NUMBER, 10), workers)
    alone = answers.row(NUMBER, 10)
    for token in b"123":
        assert row.may_refuse == alone.may_refuse
        assert (row.mask() == alone.mask()).all()
        assert row.take(token)
        assert alone.take(token)
    assert row.take_way_out() == alone.take_way_out()
    assert makers.count(threading.current_thread()) == 3  # of the one that is alone


def test_a_mask_that_is_late_ends_its_answer_and_a_wait(answers, workers, monkeypatch):
    monkeypatch.setattr(beside, "_MASK_S", 0.01)
    go_on = threading.Event()
    monkeypatch.setattr(GrammarRow, "prepare", lambda row: go_on.wait(5))
    row = BesideRow(answers.row(NUMBER, 10), workers)
    with pytest.raises(ConstraintFailed, match="too complex"):
        row.mask()
    go_on.set()
    with pytest.raises(ConstraintFailed, match="too complex"):  # though it may have come by now
        row.take(ord("1"))
