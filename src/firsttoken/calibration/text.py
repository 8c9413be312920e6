"""The text that is calibrated on where none is given, and windows of a text."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import numpy as np
import numpy.typing as npt

from firsttoken.core.errors import ConfigError

# So many characters for a token are enough for any text, and few enough to be tokenised at once.
_CHARACTERS, _PIECES = 256, 64


def default_text() -> str:
    """English about Python: the language reference that comes with it, 79 articles in 3.13. Raises `ConfigError` where
    the installation left it out."""
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError:
        raise ConfigError(
            "this Python was installed without pydoc_data, the default text: give one by --calibration"
        ) from None
    return "\n".join(topics[name] for name in sorted(topics))


def thinned(text: str, tokens: int) -> str:
    """What of a text is worth tokenising for ``tokens`` of it: all, or of a very long one pieces from all over it."""
    most = tokens * _CHARACTERS
    if len(text) <= most:
        return text
    length = most // _PIECES
    return "".join(text[first : first + length] for first in range(0, len(text), -(-len(text) // _PIECES)))


def windows(tokens: Sequence[int], context: int, most: int) -> npt.NDArray[np.int64]:
    """``[W, context]``: ``most`` tokens at most, in pieces from all over the text. Raises `ConfigError` for a text that
    is too short for two."""
    whole = len(tokens) // context
    if whole < 2:
        raise ConfigError(
            f"the calibration text has {len(tokens)} tokens: two windows of {context} are the least, give a longer one"
        )
    count = min(whole, max(2, most // context))
    first = np.arange(count) * whole // count * context
    return np.asarray(tokens, dtype=np.int64)[first[:, None] + np.arange(context)]
