"""docs/known-faults.md names a test for each fault, and the test is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "known-faults.md").read_text(encoding="utf-8")
ROWS = [line for line in TABLE.splitlines() if re.match(r"\| BB-\d\d \|", line)]
TEST = re.compile(r"`([\w/.]+\.py)(?:::(\w+))?`")


def test_every_fault_has_a_row():
    numbers = [row.split("|")[1].strip() for row in ROWS]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 40


def test_every_row_names_tests_that_are_there():
    for row in ROWS:
        named = TEST.findall(row.split("|")[-2])
        assert named, row
        for file, test in named:
            source = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert not test or re.search(rf"def {test}\(", source), f"{file}::{test}"


def test_every_test_of_a_fault_is_in_the_table():
    found = {number for path in Path(__file__).parent.glob("test_*.py") for number in _numbers(path)}
    assert found <= {row.split("|")[1].strip()[3:] for row in ROWS}


def _numbers(path: Path) -> list[str]:
    return re.findall(r"bb(\d\d)", " ".join(re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))))
