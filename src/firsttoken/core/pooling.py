"""A vector in place of a prompt's tokens."""

from __future__ import annotations

from typing import Literal

# The mean of a prompt's hidden states, or that of its last token.
PoolingKind = Literal["mean", "last"]
POOLING_KINDS: tuple[PoolingKind, ...] = ("mean", "last")
