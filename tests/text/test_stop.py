import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.text.stop import StopHit, StopScanner


def scan(stops: tuple[str, ...], parts: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """Every piece emitted, and the stop that was found."""
    scanner = StopScanner(stops, include)
    pieces: list[str] = []
    for part in parts:
        found = scanner.push(part)
        if isinstance(found, StopHit):
            return [*pieces, found.text], found.stop
        pieces.append(found)
    return [*pieces, scanner.finish()], None


def naive(stops: tuple[str, ...], text: str, *, include: bool) -> tuple[str, str | None]:
    """The same on the whole text: the first end of any stop, and of those that end there the longest."""
    for end in range(1, len(text) + 1):
        found = max((stop for stop in stops if text[:end].endswith(stop)), key=len, default=None)
        if found is not None:
            return text[: end if include else end - len(found)], found
    return text, None


@settings(max_examples=500)
@given(
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=5).map(tuple),
    parts=st.lists(st.text(alphabet="abc", max_size=8), max_size=12),
    include=st.booleans(),
)
def test_equals_a_search_in_the_whole_text_for_any_split(stops, parts, include) -> None:
    pieces, hit = scan(stops, parts, include=include)
    assert ("".join(pieces), hit) == naive(stops, "".join(parts), include=include)


@given(
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=5).map(tuple),
    text=st.text(alphabet="abc", max_size=30),
)
def test_holds_back_no_more_than_may_begin_a_stop(stops, text) -> None:
    scanner, shown = StopScanner(stops), ""
    for at, character in enumerate(text, 1):
        found = scanner.push(character)
        if isinstance(found, StopHit):
            return
        shown += found
        held = max(n for stop in stops for n in range(len(stop)) if text[:at].endswith(stop[:n]))
        assert shown == text[: at - held]


def test_nothing_of_a_stop_string_is_shown_before_it_completes() -> None:
    assert scan(("DEFGHIJ",), ["D", "EF", "G", "HI", "J"]) == ([""] * 5, "DEFGHIJ")
    pieces, hit = scan(("DEFXYZ",), ["D", "EF", "G", "HI", "J"])
    assert ("".join(pieces), hit) == ("DEFGHIJ", None)


def test_held_text_is_released_at_the_end() -> None:
    assert scan(("DEFXYZ",), ["abcD", "EF"]) == (["abc", "", "DEF"], None)


def test_a_stop_that_ends_inside_a_piece_is_found() -> None:
    assert scan(("Pari",), [" is", " Paris", ".\n"]) == ([" is", " "], "Pari")
    assert scan(("lo",), ["do", "lor"]) == (["do", ""], "lo")


def test_the_stop_itself_is_shown_when_asked_for_and_nothing_after_it() -> None:
    assert scan(("END",), ["x E", "ND y"], include=True) == (["x ", "END"], "END")


def test_of_stops_that_end_together_the_longest_wins() -> None:
    assert scan(("bc", "abc"), ["abc"]) == ([""], "abc")
    assert scan(("abcd", "bc"), ["abcd"]) == (["a"], "bc")


def test_without_stops_text_passes() -> None:
    assert scan((), ["a", "", "b"]) == (["a", "", "b", ""], None)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopScanner(("",))


def test_time_is_linear_in_the_text_whatever_the_stops() -> None:
    long = "a" * 1_000_000 + "b"
    began = time.thread_time()
    StopScanner((long,)).push("aa")
    assert time.thread_time() - began < 0.1  # no table is built for a stop's length: that would take 0.3 s

    def seconds(length: int) -> float:
        scanner = StopScanner((long, "a" * 5000 + "b", "ab" * 3000 + "c"))
        began = time.thread_time()
        for _ in range(length):
            scanner.push("aab")
        return time.thread_time() - began

    short, four_times = min(seconds(2000) for _ in range(3)), min(seconds(8000) for _ in range(3))
    assert four_times < 10 * short  # quadratic would be 16
