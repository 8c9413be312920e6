"""Times as people write them."""

from __future__ import annotations

import re

_DURATION = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*(us|ms|s|min)")
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "min": 6e4}


def milliseconds(text: str) -> float:
    """From ``80ms``, ``1.5s``, ``500us`` or ``2min``. Raises `ValueError` for anything else, a number alone too."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r:.80} is not a time: write it as in 80ms or 1.5s (us, ms, s, min)")
    return float(match[1]) * _MS[match[2]]
