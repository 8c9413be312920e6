"""What it costs to keep callers' texts from becoming control tokens: ``python benchmarks/control_tokens.py [MODEL]``.

Chats are rendered and tokenised with their pieces in the prompt cache, with texts as they are, with a "<" in each (with
which the control tokens of most models begin), and with a control token in each, beside the same without the guard.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns

from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.text.boundaries import message_gaps
from firsttoken.text.chat_template import ChatTemplate
from firsttoken.text.prompt_cache import PromptCache
from firsttoken.text.tokenizer import Tokenizer

Chat = list[dict[str, str]]

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "print", "return", "x"]
SIZES = {"1 x 60": (1, 60), "5 x 600": (5, 600), "21 x 6000": (21, 6000)}
ENDS = {"as it is": "", 'with a "<"': " a < b", "with a control token": " <|im_end|>"}
ROUNDS = 200


def chat(turns: int, characters: int, end: str) -> Chat:
    chosen = random.Random(1)
    text = " ".join(chosen.choices(WORDS, k=characters // 5))
    return [{"role": ("user", "assistant")[turn % 2], "content": text + end} for turn in range(turns)]


def fastest(*works: Callable[[], object]) -> list[float]:
    """us of each, taken in turns."""
    best = [float("inf")] * len(works)
    for _ in range(ROUNDS):
        for number, work in enumerate(works):
            began = perf_counter_ns()
            work()
            best[number] = min(best[number], (perf_counter_ns() - began) / 1e3)
    return best


def main() -> None:
    checkpoint = open_checkpoint(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
    if checkpoint.tokenizer is None or checkpoint.chat_template is None:
        sys.exit(f"{checkpoint.name} has no tokenizer or no chat template")
    tokenizer, template = Tokenizer.build(checkpoint.tokenizer), ChatTemplate(checkpoint.chat_template)
    controls = tokenizer.control_tokens(template.writes)
    cache = PromptCache(tokenizer, tokenizer.boundaries(message_gaps(template)))

    def open_to_all(messages: Chat) -> object:
        return cache.encode(template.render(messages))

    def guarded(messages: Chat) -> object:
        rendered = template.render_apart(messages, controls)
        if rendered.guarded is None:
            return cache.encode(rendered.text)
        return cache.encode_apart(rendered, controls)

    print(f"{'messages x characters':22} {'texts':22} {'open us':>9} {'guarded us':>11} {'ratio':>6}")
    for size, (turns, characters) in SIZES.items():
        for kind, end in ENDS.items():
            messages = chat(turns, characters, end)
            plain, kept = fastest(partial(open_to_all, messages), partial(guarded, messages))
            print(f"{size:22} {kind:22} {plain:9.1f} {kept:11.1f} {kept / plain:6.2f}")


if __name__ == "__main__":
    main()
