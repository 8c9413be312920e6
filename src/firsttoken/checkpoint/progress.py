"""How long work (a download, a check) tells its caller where it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

Stage = Literal["download", "verify", "unpack"]


class Progress(msgspec.Struct, frozen=True):
    """``done`` of ``total`` bytes of ``name``; ``total`` is None while it is not known."""

    stage: Stage
    name: str
    done: int
    total: int | None


OnProgress = Callable[[Progress], None]


def ignore_progress(_: Progress) -> None:
    """For callers that do not want to know."""
