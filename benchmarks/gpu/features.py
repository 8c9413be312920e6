"""What requests may ask for besides text, on the graph executor against the CPU's in float32.

    python -m benchmarks.gpu.features --model FOLDER --output features.json

Vectors of prompts, log-probabilities of prompt tokens, tokens that alone are allowed, words that are forbidden, and
answers held to a JSON schema beside free ones in the same steps. ``difference`` is the largest of each, in its own
unit (1 - cosine, nats), beside what bfloat16 allows. ``neighbours_changed`` counts free answers that are others because
held ones were computed beside them: near ties alone may do that, so it is told, not judged. Exit code 1 when something
is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from firsttoken import LLM, SamplingParams
from firsttoken.cli import report
from firsttoken.core.grammar import Grammar

PROMPTS = [
    "The capital of France is", "It is a truth universally acknowledged, that", "In the beginning", "Call me Ishmael.",
    "Fellow citizens of the Senate and of the House of Representatives:", "The climate is", "Population growth rate:",
    "And he said unto them,",
]  # fmt: skip
MOST = {"vectors": 0.01, "prompt_logprobs": 0.5, "prompt_logprobs_mean": 0.05}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["red", "green"]}, "count": {"type": "integer"}, "good": {"type": "boolean"}},
    "required": ["name", "count", "good"],
    "additionalProperties": False,
}
TOKENS = 48


def vectors(llm: LLM) -> list[list[float]]:
    return [output.outputs.embedding for output in llm.embed(PROMPTS)]


def apart(a: list[float], b: list[float]) -> float:
    """1 - the cosine: vectors have length 1."""
    return 1 - sum(x * y for x, y in zip(a, b, strict=True))


def prompt_logprobs(llm: LLM) -> list[float]:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for output in llm.generate(PROMPTS, params):
        assert output.prompt_logprobs is not None
        for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            found.append(entry[token].logprob)
    return found


def allowed(llm: LLM) -> bool:
    """Greedy and drawn answers of a few tokens alone."""
    few = sorted(set(llm.get_tokenizer().encode(" the and of to in", add_special_tokens=False)))
    params = [
        SamplingParams(temperature=temperature, seed=3, max_tokens=TOKENS, ignore_eos=True, allowed_token_ids=few)
        for temperature in (0.0, 1.0)
    ]
    outputs = [output for one in params for output in llm.generate(PROMPTS, one)]
    return all(set(output.outputs[0].token_ids) <= set(few) for output in outputs)


def forbidden(llm: LLM) -> bool:
    """Words that stand in the free answers, forbidden in the next."""
    free = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    for output in free:
        words = [word for word in dict.fromkeys(output.outputs[0].text.split()) if word.isalpha() and len(word) < 20][
            :5
        ]
        if not words:
            continue
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, bad_words=words)
        (held,) = llm.generate(output.prompt_token_ids, params)
        if any(word in held.outputs[0].text.split() for word in words):
            return False
    return True


def held(llm: LLM) -> dict[str, Any]:
    """Answers to a schema in every other row; the free ones between them, with and without such neighbours."""
    free = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    schema = SamplingParams(temperature=0, max_tokens=TOKENS, grammar=Grammar("json_schema", json.dumps(SCHEMA)))
    alone = llm.generate(PROMPTS, free)
    mixed = llm.generate(PROMPTS, [schema if row % 2 else free for row in range(len(PROMPTS))])
    texts = [output.outputs[0].text for output in mixed[1::2]]
    changed = sum(
        a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(alone[::2], mixed[::2], strict=True)
    )  # fmt: skip
    return {"answers": texts, "right": all(_fits(text) for text in texts), "neighbours_changed": changed}


def _fits(text: str) -> bool:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return False
    return (
        set(found) == set(SCHEMA["required"])
        and found["name"] in ("red", "green")
        and isinstance(found["count"], int)
        and isinstance(found["good"], bool)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model with a tokenizer")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with LLM(options.model, device="cpu", dtype="float32", quantization="none", max_model_len=256) as cpu:
        right_vectors, right_logprobs = vectors(cpu), prompt_logprobs(cpu)
    with LLM(options.model, device=options.device, max_model_len=256, max_num_seqs=16) as llm:
        head = report.header(llm.info)
        differences = [abs(a - b) for a, b in zip(prompt_logprobs(llm), right_logprobs, strict=True)]
        found: dict[str, Any] = {
            "vectors": max(apart(a, b) for a, b in zip(vectors(llm), right_vectors, strict=True)),
            "prompt_logprobs": max(differences),
            "prompt_logprobs_mean": sum(differences) / len(differences),
        }
        right = {name: found[name] <= most for name, most in MOST.items()}
        found["held"] = held(llm)
        right |= {"held": found["held"]["right"], "allowed_token_ids": allowed(llm), "bad_words": forbidden(llm)}
    text = json.dumps({**head, "differences": found, "allowed": MOST, "right": right}, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    return 0 if all(right.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
