"""Whether a model still finds a fact in long text when its KV is kept in fewer bits.

    python -m benchmarks.needle [--model smollm2] [--tokens 1000,2000] [--kv-dtype auto,int8,fp8,int4] [--json]

A sentence with a made-up number lies at several depths of text that is otherwise prose; the model is then asked for the
number and must begin its answer with it, greedily. The prose is the documentation of Python's own library. What counts
is what 16 bits find and fewer do not.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pydoc_data.topics import topics
from random import Random
from typing import Any

from firsttoken.core.sampling_params import SamplingParams
from firsttoken.frontend.llm import LLM

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
NEEDLE = "The secret number of the lighthouse is {}."
QUESTION = "What is the secret number of the lighthouse? Answer with the number alone."
ANSWER = "The secret number of the lighthouse is"


@functools.cache
def prose(seed: int) -> list[str]:
    """Sentences in an order of the seed's, a topic after another."""
    names = sorted(topics)
    Random(seed).shuffle(names)
    text = " ".join(" ".join(topics[name].split()) for name in names)
    return [sentence.strip() + "." for sentence in text.split(". ") if 40 < len(sentence) < 300]


def prompt_of(llm: LLM, tokens: int, depth: float, number: str, seed: int) -> list[int]:
    """A chat in which about ``tokens`` tokens of prose stand before the question."""
    tokenizer = llm.get_tokenizer()
    kept: list[str] = []
    room = tokens
    for sentence in prose(seed):
        room -= len(tokenizer.encode(" " + sentence, add_special_tokens=False))
        if room < 0:
            break
        kept.append(sentence)
    kept.insert(int(depth * len(kept)), NEEDLE.format(number))
    text = f"{' '.join(kept)}\n\n{QUESTION}"
    asked = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n{ANSWER}"
    return list(tokenizer.encode(asked))


def found(llm: LLM, tokens: int, trials: int) -> list[dict[str, Any]]:
    numbers = Random(7)
    cases = [(depth, str(numbers.randrange(1000, 9999)), trial) for trial in range(trials) for depth in DEPTHS]
    prompts = [prompt_of(llm, tokens, depth, number, trial) for depth, number, trial in cases]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    return [
        {"depth": depth, "prompt_tokens": len(prompt), "found": number in output.outputs[0].text.replace(",", "")}
        for (depth, number, _), prompt, output in zip(cases, prompts, outputs, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a model whose chats are marked as SmolLM2's")
    parser.add_argument("--tokens", default="1000,2000", help="of prose, comma-separated")
    parser.add_argument("--kv-dtype", default="auto,int8,fp8,int4", help="comma-separated")
    parser.add_argument("--trials", type=int, default=1, help="texts at each of the five depths")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    options = parser.parse_args(argv)
    results = []
    for kv_dtype in options.kv_dtype.split(","):
        # As many as are in a step share its time: one at a time keeps memory small.
        with LLM(options.model, kv_dtype=kv_dtype, max_num_seqs=2) as llm:
            for tokens in map(int, options.tokens.split(",")):
                cases = found(llm, tokens, options.trials)
                hits = sum(case["found"] for case in cases)
                results.append(
                    {"kv_dtype": kv_dtype, "tokens": tokens, "found": hits, "of": len(cases), "cases": cases}
                )
                print(f"{kv_dtype:9} {tokens:6} tokens: found {hits} of {len(cases)}", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"command": "needle", "model": options.model, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
