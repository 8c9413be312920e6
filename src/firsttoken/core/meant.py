"""What somebody who misspelt a word will have meant."""

from __future__ import annotations

from collections.abc import Iterable

# Below this a word is another one, not a misspelt one: --version is 0.64 of --kv-eviction.
_RESEMBLES = 0.72


def meant(typed: str, known: Iterable[str]) -> str:
    """The end of a message that refuses ``typed``: the one of ``known`` words that it resembles, if there is one."""
    import difflib  # only ever for a mistake

    words = list(known)
    found = difflib.get_close_matches(typed, words, n=1, cutoff=_RESEMBLES)
    # Of names that differ in their number alone, the one of the nearest number.
    stem, number = _numbered(typed)
    near = {
        word: abs(other - number)
        for word in words
        if (parts := _numbered(word))[0] == stem and (other := parts[1]) >= 0
    }
    if number >= 0 and near:
        found = [min(near, key=lambda word: near[word])]
    return f"; did you mean {found[0]}?" if found else ""


def _numbered(word: str) -> tuple[str, int]:
    """A word without the number at its end, and that number; -1 for none."""
    stem = word.rstrip("0123456789")
    digits = word[len(stem) :]
    return stem, int(digits[:9]) if digits else -1
