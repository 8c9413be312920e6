"""What the prompt cache (tier L1) saves, in chats of many turns and where a system prompt is shared, and what it costs.

A chat's *next turn* is asked when all turns before it are in the cache, as in a conversation; *first* is the same chat
when nothing is. *Pool* is what the server waits for: from messages to ids, template and the way to a thread included.
Each round has a text of its own, with and without the cache in turns; figures are medians.

    python benchmarks/prompt_cache.py --output-json benchmarks/results/cpu/prompt_cache.json

A text of fewer characters than `prompt_cache.SHORT` passes by: exits 1 when it pays more than ``--target-us``.
Needs the model's files (`firsttoken pull smollm2`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from firsttoken.cli.report import header
from firsttoken.core.clock import NS_PER_MS, now_ns
from firsttoken.core.engine_args import DEFAULT_MODEL, EngineArgs
from firsttoken.frontend.loading import load_text
from firsttoken.text.boundaries import message_gaps
from firsttoken.text.chat_template import ChatTemplate
from firsttoken.text.pace import Pace
from firsttoken.text.pool import TextPool
from firsttoken.text.prompt_cache import PromptCache
from firsttoken.text.tokenizer import Tokenizer

TURNS = 20
TEXT = (
    "the captain went below to find his charts and nobody had touched them since autumn 1893 damp soundings; "
    "def cut(x): return [one for one in x.split() if one] coast harbour Zürich 東京 lamp copy 3.14159 brown stain swore"
)
WORDS = TEXT.split()
_TOKENS_OF_A_WORD = 1.72
_BELOW_SHORT, _ABOVE_SHORT = 80, 130  # words: about 560 and 850 characters with the model's own system prompt
_BLOCKS, _BLOCK = 200, 50
NS_PER_US = 1000

Messages = list[dict[str, str]]


class Bench:
    """One model's text, measured."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, rounds: int) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.rounds = rounds
        self.boundaries = tokenizer.boundaries(message_gaps(template))
        if not self.boundaries:
            raise SystemExit("this model's prompts cannot be cut, so it has no prompt cache")
        self.pace = Pace.measure(tokenizer, template, self.cache())
        self._random = random.Random(0)

    def cache(self) -> PromptCache:
        return PromptCache(self.tokenizer, self.boundaries)

    def words(self, count: int) -> str:
        return " ".join(self._random.choices(WORDS, k=count))

    def chat(self, tokens: int) -> Messages:
        """A chat that ends with its `TURNS`-th question, of about ``tokens`` tokens; a fifth of them the asker's."""
        each = tokens / TURNS / _TOKENS_OF_A_WORD
        messages = [{"role": "system", "content": self.words(40)}]
        for _ in range(TURNS):
            messages.append({"role": "user", "content": self.words(int(each / 5))})
            messages.append({"role": "assistant", "content": self.words(int(each * 4 / 5))})
        return messages[:-1]

    async def turns(self, tokens: int) -> dict[str, Any]:
        times: dict[str, list[float]] = {}

        def note(name: str, work: Callable[[], object]) -> None:
            began = now_ns()
            work()
            times.setdefault(name, []).append((now_ns() - began) / NS_PER_MS)

        counts = []
        for _ in range(self.rounds):
            messages = self.chat(tokens)
            before, text = self.template.render(messages[:-2]), self.template.render(messages)
            cache = self.cache()
            cache.encode(before)
            note("template_ms", lambda: self.template.render(messages))  # noqa: B023
            note("tokenise_ms", lambda: self.tokenizer.encode(text, add_special_tokens=False))  # noqa: B023
            note("first_ms", lambda: self.cache().encode(text))  # noqa: B023
            note("next_turn_ms", lambda: cache.encode(text))  # noqa: B023
            note("again_ms", lambda: cache.encode(text))  # noqa: B023
            whole = self.tokenizer.encode(text, add_special_tokens=False)
            if cache.encode(text) != whole:
                raise SystemExit("the cache gives other tokens than the tokenizer")
            counts.append(len(whole))
            times.setdefault("pool_ms", []).append(await self.pool_ms(None, [messages]))
            times.setdefault("pool_next_turn_ms", []).append(
                await self.pool_ms(self.cache(), [messages[:-2], messages])
            )
        return {"tokens": int(statistics.median(counts)), **_medians(times)}

    async def pool_ms(self, cache: PromptCache | None, chats: Sequence[Messages]) -> float:
        """Of the last of ``chats``, which come one after the other."""
        pool = TextPool(self.tokenizer, self.template, pace=self.pace, cache=cache)
        await pool.render_and_encode([{"role": "user", "content": "x" * 2000}])  # the threads exist
        for messages in chats:
            began = now_ns()
            await pool.render_and_encode(messages)
            took = now_ns() - began
        pool.close()
        return took / NS_PER_MS

    async def shared(self, tokens: int) -> dict[str, Any]:
        """Chats that begin with the same system prompt and go on with another short question."""
        times: dict[str, list[float]] = {}
        for _ in range(self.rounds):
            system = {"role": "system", "content": self.words(int(tokens / _TOKENS_OF_A_WORD))}
            chats = [[system, {"role": "user", "content": self.words(10)}] for _ in range(2)]
            times.setdefault("pool_ms", []).append(await self.pool_ms(None, chats))
            times.setdefault("pool_known_ms", []).append(await self.pool_ms(self.cache(), chats))
        return {"tokens": tokens, **_medians(times)}

    def short(self, words: int) -> dict[str, float]:
        """What the cache adds to a text that is new each time: us of processor time, in the fastest of many blocks,
        since others use the machine too."""
        cache = self.cache()
        plain: list[float] = []
        cached: list[float] = []
        for number in range(_BLOCKS):
            texts = [self.template.render([{"role": "user", "content": self.words(words)}]) for _ in range(_BLOCK)]
            ways = [(plain, self._plain), (cached, cache.encode)]
            for times, encode in ways if number % 2 else reversed(ways):
                began = time.thread_time_ns()
                for text in texts:
                    encode(text)
                times.append((time.thread_time_ns() - began) / _BLOCK / NS_PER_US)
        return {"characters": len(texts[0]), "tokenise_us": min(plain), "added_us": min(cached) - min(plain)}

    def _plain(self, text: str) -> array[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def _medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


async def measure(bench: Bench, sizes: Sequence[int], systems: Sequence[int]) -> dict[str, Any]:
    async def each(work: Callable[[int], Awaitable[dict[str, Any]]], counts: Sequence[int]) -> list[dict[str, Any]]:
        return [await work(count) for count in counts]

    return {
        "chats": await each(bench.turns, sizes),
        "system_prompts": await each(bench.shared, systems),
        "short": [bench.short(_BELOW_SHORT), bench.short(_ABOVE_SHORT)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="what the prompt cache saves and costs")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose tokenizer and template (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--target-us", type=float, default=5.0, help="bound on what a short prompt pays")
    parser.add_argument("--output-json", type=Path, metavar="FILE")
    args = parser.parse_args()
    text = load_text(EngineArgs(model=args.model, offline=True))
    if text.tokenizer is None or text.chat_template is None:
        raise SystemExit(f"{args.model} has no tokenizer or no chat template")
    bench = Bench(text.tokenizer, text.chat_template, args.rounds)
    result = header(model=text.name, rounds=args.rounds) | {"turns": TURNS, "target_us": args.target_us}
    result |= asyncio.run(measure(bench, (1000, 8000, 32_000), (1000, 4000)))
    if args.output_json is not None:
        args.output_json.write_text(json.dumps(result, indent=1) + "\n")
    for name in ("chats", "system_prompts", "short"):
        for one in result[name]:
            print(f"{name:15}", "  ".join(f"{key} {value:.3f}".replace(".000", "") for key, value in one.items()))
    return 0 if result["short"][0]["added_us"] < args.target_us else 1


if __name__ == "__main__":
    sys.exit(main())
