"""Helpers around an AsyncLLM that runs on the scripted engine."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence

from firsttoken.engine.stub import Fault, Script
from firsttoken.frontend.async_llm import AsyncLLM
from firsttoken.frontend.generation import Delta, Generation

PROMPT = array("I", [49, 49, 49])


def says(text: str | bytes | Sequence[int | Fault]) -> Script:
    """A script that gives every request these bytes, one a token."""
    tokens = list(text.encode() if isinstance(text, str) else text)
    return lambda request: tokens


async def read(generation: Generation, into: list[Delta] | None = None) -> list[Delta]:
    """Everything to the end; ``into`` keeps what came before an error."""
    deltas = [] if into is None else into
    async for delta in generation:
        deltas.append(delta)  # a comprehension would lose them on an error
    return deltas


def text_of(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def tokens_of(deltas: list[Delta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


async def settle(llm: AsyncLLM, **expected: int) -> None:
    """Wait until the engine's gauges say what is expected; fails after 2 s."""
    deadline = time.monotonic() + 2
    while any(getattr(llm.stats, name) != value for name, value in expected.items()):
        assert time.monotonic() < deadline, f"wanted {expected}, the engine says {llm.stats}"
        await asyncio.sleep(0.01)
