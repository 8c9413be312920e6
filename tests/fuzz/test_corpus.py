"""Each fuzz target on what fuzzing has found, and a little beside it. For more: ``python -m benchmarks.fuzz``."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.fuzz.targets import TARGETS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CORPUS = Path(__file__).parent / "corpus"
# So many inputs more for each target: a second or less, and each time others.
FRESH = 60


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_found_once_is_found_no_more(name):
    kept = sorted((CORPUS / name).iterdir())
    assert kept, f"nothing to begin with in {CORPUS / name}"
    for path in kept:
        TARGETS[name].run(path.read_bytes())


def near(target: str) -> st.SearchStrategy[bytes]:
    """Bytes, and kept inputs with some of their bytes changed."""
    bases = [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]
    changes = st.lists(st.tuples(st.integers(0, 4000), st.binary(max_size=8)), min_size=1, max_size=3)
    return st.binary(max_size=64) | st.builds(_changed, st.sampled_from(bases), changes)


def _changed(base: bytes, changes: list[tuple[int, bytes]]) -> bytes:
    for place, added in changes:
        at = place % (len(base) + 1)
        base = base[:at] + added + base[at + place % 3 :]
    return base


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_near_it_is_a_fault(name):
    @settings(max_examples=FRESH, deadline=None, suppress_health_check=list(HealthCheck))
    @given(near(name))
    def check(data):
        TARGETS[name].run(data)

    check()
