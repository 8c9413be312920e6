"""Waiting for an engine that still captures its steps."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from firsttoken.bench.session import Session
from firsttoken.transport.messages import EngineStats


class _LLM:
    """Has prepared one more kind of step each time that it is asked."""

    def __init__(self, unprepared: int) -> None:
        self._left = unprepared

    @property
    def stats(self) -> EngineStats:
        self._left -= 1
        return EngineStats(unprepared=max(self._left + 1, 0))


def prepare(llm: object, limit_s: float) -> float | None:
    return asyncio.run(Session(llm, {}).prepare(limit_s))  # type: ignore[arg-type]


def test_an_engine_that_has_prepared_its_steps_is_not_waited_for() -> None:
    prepared = prepare(_LLM(0), 0.0)
    assert prepared is not None
    assert prepared < 0.04


def test_the_wait_ends_when_all_is_prepared() -> None:
    prepared = prepare(_LLM(3), 10.0)
    assert prepared is not None
    assert 0.1 < prepared < 5


def test_an_engine_that_never_gets_there_is_measured_all_the_same() -> None:
    assert prepare(SimpleNamespace(stats=EngineStats(unprepared=7)), 0.1) is None
