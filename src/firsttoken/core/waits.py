"""What a request in the engine's queue waits for."""

from __future__ import annotations

from enum import IntEnum


class Wait(IntEnum):
    """Each instant in the queue has one of these."""

    SLOT = 0  # all slots are taken
    KV = 1  # too few KV blocks are free, for now or for what those that run will grow to
    BUDGET = 2  # the steps' prompt tokens went to those before it
    RESTORE = 3  # a place to restore its KV to; restoring itself is no queueing
    GRAMMAR = 4  # its grammar, which is being compiled
    ORDER = 5  # somebody before it lacks something, and is not passed
    WINDOW = 6  # the batch window holds it back
    PREFIX = 7  # another prompt is just computing the beginning that it shares
    STEP = 8  # the next plan, which is made when a step is due


WAIT_NAMES = tuple(wait.name.lower() for wait in Wait)
