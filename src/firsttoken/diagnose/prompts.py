"""Prompts of about so many tokens, of common words, which most tokenizers keep whole."""

from __future__ import annotations

import random

_TEXT = """
    time year people way day man thing woman life child world school state family student group country problem
    hand part place case week company system program question work number night point home water room mother area money
    story fact month lot right study book eye job word business issue side kind head house service friend father
    power hour game line end member law car city name team minute idea body information back parent face level office
"""
_WORDS = tuple(_TEXT.split())


def words(tokens: int, seed: str) -> str:
    """The same words for the same seed; two seeds share no beginning longer than chance has it."""
    rng = random.Random(seed)
    return " ".join(rng.choice(_WORDS) for _ in range(max(tokens, 1)))
