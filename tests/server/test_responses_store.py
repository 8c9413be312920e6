"""What is kept of responses: bounded in number, bytes and age, each tenant's by itself."""

from __future__ import annotations

import pytest

from firsttoken.server.responses.store import Kept, ResponseStore


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def kept(name: str, previous: str | None = None, size: int = 10) -> Kept:
    return Kept(name, b"x" * size, b"", b"", previous)


def names(chain) -> list[str]:
    return [one.id for one in chain]


def test_a_tenant_finds_its_own_and_no_others():
    store = ResponseStore(10)
    assert store.put("a", kept("r1"))
    assert store.get("a", "r1").body == b"x" * 10
    assert store.get("b", "r1") is None
    assert not store.delete("b", "r1")
    assert store.chain("b", "r1") == "r1"
    assert store.delete("a", "r1")
    assert (store.get("a", "r1"), len(store), store.size) == (None, 0, 0)


def test_a_chain_is_told_oldest_first_and_what_is_missing_by_its_id():
    store = ResponseStore(10)
    for name, previous in (("r1", None), ("r2", "r1"), ("r3", "r2")):
        assert store.put("", kept(name, previous))
    assert names(store.chain("", "r3")) == ["r1", "r2", "r3"]
    store.delete("", "r1")
    assert store.chain("", "r3") == "r1"
    assert not store.put("", kept("r4", "r3"))  # nobody could go on from it


def test_what_was_used_least_lately_goes_first_and_with_it_the_end_of_its_conversation():
    store = ResponseStore(4)
    for name, previous in (("r1", None), ("r2", "r1"), ("s1", None), ("s2", "s1")):
        store.put("", kept(name, previous))
    store.chain("", "r2")
    store.put("", kept("t1"))
    assert store.chain("", "s2") == "s2"
    assert names(store.chain("", "r2")) == ["r1", "r2"]
    assert names(store.chain("", "s1")) == ["s1"]


def test_whoever_takes_up_most_makes_room():
    store = ResponseStore(4)
    store.put("quiet", kept("q"))
    for number in range(20):
        assert store.put("busy", kept(f"r{number}"))
    assert store.get("quiet", "q")
    assert [store.get("busy", f"r{number}") is not None for number in range(15, 20)] == [False, False, True, True, True]
    sizes = ResponseStore(100, max_bytes=5000)
    sizes.put("quiet", kept("q"))
    for number in range(20):
        assert sizes.put("busy", kept(f"r{number}", size=1000))
    assert sizes.get("quiet", "q")
    assert sizes.size <= 5000
    assert not sizes.put("busy", kept("huge", size=6000))
    assert sizes.get("busy", "r19")


def test_age_counts_from_the_last_use():
    clock = Clock()
    store = ResponseStore(10, age_s=60, clock=clock)
    store.put("", kept("r1"))
    store.put("", kept("r2"))
    clock.now = 50
    assert store.get("", "r1")
    clock.now = 61
    assert store.get("", "r2") is None
    assert store.get("", "r1")
    clock.now = 200
    assert store.get("", "r1") is None
    assert (len(store), store.size) == (0, 0)


@pytest.mark.parametrize("capacity", [0, 1])
def test_the_least_capacities(capacity):
    store = ResponseStore(capacity)
    assert store.put("a", kept("r1")) == store.put("a", kept("r2")) == bool(capacity)
    assert len(store) == capacity
