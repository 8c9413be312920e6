"""Engines around scripted executors, which end with their test."""

from __future__ import annotations

import pytest

from tests.support.scripted_engine import Engine


@pytest.fixture
def start():
    engines = []

    def make(*args, **kwargs):
        engines.append(Engine(*args, **kwargs))
        return engines[-1]

    yield make
    for engine in engines:
        if engine.thread.is_alive():
            engine.stop()


@pytest.fixture(params=[1, 2, 3])
def depth(request):
    return request.param
