"""The text that is calibrated on where none is given, and windows of a text."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import numpy as np
import numpy.typing as npt

from firsttoken.core.errors import ConfigError


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
