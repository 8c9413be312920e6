"""What it takes to compute a prompt for its own sake, beside what its first token takes: in turn, on one engine.

    python -m benchmarks.prompts_alone --model smollm2 --tokens 256 --repeat 9

Prints the median time of each kind and its ratio to that of the first token. The prefix cache is off.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from statistics import median
from time import perf_counter

from firsttoken import LLM, SamplingParams

FIRST = SamplingParams(temperature=0, max_tokens=1)


def kinds(llm: LLM, prompts: list[list[int]]) -> dict[str, Callable[[], object]]:
    """Ways to use the prompts, by name."""
    return {
        "first token": lambda: llm.generate(prompts, FIRST),
        "vector": lambda: llm.embed(prompts),
        "prompt_logprobs 0": lambda: llm.generate(prompts, FIRST.replace(max_tokens=0, prompt_logprobs=0)),
        "prompt_logprobs 20": lambda: llm.generate(prompts, FIRST.replace(max_tokens=0, prompt_logprobs=20)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--pooling", default="auto", choices=("auto", "mean", "last"))
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=9)
    options = parser.parse_args()
    rng = random.Random(0)
    with LLM(options.model, prefix_caching=False, pooling=options.pooling) as llm:
        vocabulary = llm.info.vocab_size
        prompts = [[rng.randrange(vocabulary) for _ in range(options.tokens)] for _ in range(options.prompts)]
        ways = kinds(llm, prompts)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for round_ in range(options.repeat + 1):
            for name, run in ways.items():
                began = perf_counter()
                run()
                if round_:  # the first one warms up
                    times[name].append(perf_counter() - began)
    least = median(times["first token"])
    print(f"{options.model}: {options.prompts} prompts of {options.tokens} tokens")
    for name, taken in times.items():
        print(f"{name:20} {1000 * median(taken):8.1f} ms {median(taken) / least:6.2f}")


if __name__ == "__main__":
    main()
