"""What callers may say of how long their KV should stay."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from firsttoken.core.cache_hint import CacheHint, retention_of
from firsttoken.core.errors import InvalidRequest
from firsttoken.core.request import EngineRequest, Request
from firsttoken.core.retention import Retention
from firsttoken.core.sampling_params import SamplingParams

SECOND = 10**9


@pytest.mark.parametrize(
    ("hint", "wish"),
    [
        ({}, Retention()),
        ({"ttl_s": 60}, Retention(60 * SECOND)),
        ({"ttl_s": 0.5}, Retention(SECOND // 2)),
        ({"ttl_s": 3600}, Retention(3600 * SECOND)),
        ({"until": "tool_result"}, Retention(60 * SECOND, None, True)),
        ({"until": "tool_result", "ttl_s": 5}, Retention(5 * SECOND, None, True)),
        ({"priority": "p0"}, Retention(0, 0)),
        ({"ttl_s": 1, "priority": "p2", "until": None}, Retention(SECOND, 2)),
    ],
)
def test_what_is_asked_for(hint: dict[str, Any], wish: Retention) -> None:
    assert retention_of(hint) == wish == retention_of(CacheHint(**hint))


@pytest.mark.parametrize(
    ("hint", "param"),
    [
        ({"ttl_s": 0}, "cache_hint.ttl_s"),
        ({"ttl_s": -1}, "cache_hint.ttl_s"),
        ({"ttl_s": 3600.5}, "cache_hint.ttl_s"),
        ({"ttl_s": float("nan")}, "cache_hint.ttl_s"),
        ({"ttl_s": float("inf")}, "cache_hint.ttl_s"),
        ({"until": "later"}, "cache_hint.until"),
        ({"priority": "p3"}, "cache_hint.priority"),
        ({"ttl_s": "60"}, "cache_hint"),
        ({"ttl_s": True}, "cache_hint"),
        ({"ttl": 60}, "cache_hint"),
        ("60", "cache_hint"),
        (60, "cache_hint"),
    ],
)
def test_what_is_refused_and_by_which_name(hint: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        retention_of(hint)
    assert caught.value.param == param
    if isinstance(hint, dict):
        assert next(iter(hint)) in str(caught.value)


def test_it_travels() -> None:
    wish = Retention(5, 1, True)
    wire = EngineRequest(
        id=1, prompt=b"\0" * 4, params=SamplingParams(), seed=0, max_tokens=1, service=2, retention=wish
    )
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=EngineRequest)
    assert again.retention == wish
    assert Request(again).kv_class == 1
    assert Request(msgspec.structs.replace(wire, retention=None)).kv_class == 2
