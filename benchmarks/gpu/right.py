"""Is the GPU right? Greedy text against the CPU's, dependent launches against plain ones, random mixes of work.

    python -m benchmarks.gpu.right --model smollm2 --output right.json

Greedy tokens must equal the CPU's in float32, or differ first where the CPU's two likeliest tokens are nearer to each
other than bfloat16 can tell. A difference after that one says nothing: the texts have parted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.decode_step import DecodeStep
from firsttoken import LLM, SamplingParams

PROMPTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at", "My favourite book is",
    "The three laws of motion", "To make bread you need", "In 1969", "The opposite of hot is", "A triangle has",
    "Dear Sir or Madam,", "The mitochondria", "SELECT name FROM", "The weather today", "Gravity is",
    "List the planets:", "She opened the door and", "The best way to learn", "Two plus two", "At the end of the day,",
]  # fmt: skip
# Logits of bfloat16 products around 20 move in steps of this size.
TIE = 0.25


def greedy_against_cpu(model: str) -> dict[str, Any]:
    """Tokens of both, 64 a prompt; where they first differ, how near the CPU's two likeliest were."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=2)
    plain = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    cpu = LLM(model, device="cpu", dtype="float32", quantization="none", max_model_len=512, kv_memory=1 << 28)
    expected = cpu.generate(PROMPTS, params)
    cpu.close()
    gpu = LLM(model, device="cuda", max_model_len=512, max_num_seqs=32)
    together = gpu.generate(PROMPTS, plain)
    alone = [gpu.generate([prompt], plain)[0] for prompt in PROMPTS]
    gpu.close()
    differences: list[dict[str, Any]] = []
    for prompt, right, found in zip(PROMPTS, expected, together, strict=True):
        tokens = right.outputs[0].token_ids
        ours = found.outputs[0].token_ids
        first = next((i for i, (a, b) in enumerate(zip(tokens, ours, strict=True)) if a != b), None)
        if first is not None:
            logprobs = right.outputs[0].logprobs
            assert logprobs is not None
            best, second = sorted((entry.logprob for entry in logprobs[first].values()), reverse=True)[:2]
            differences.append({"prompt": prompt, "at": first, "gap": round(best - second, 4)})
    parted = sum(a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(together, alone, strict=True))
    return {
        "prompts": len(PROMPTS),
        "equal": len(PROMPTS) - len(differences),
        "differences": differences,
        "explained_by_ties": all(each["gap"] < TIE for each in differences),
        "alone_and_together_differ": parted,
    }


def dependent_launches(replays: int) -> dict[str, Any]:
    """The whole 1B step with dependent launches, replayed, against itself without: every bit of the logits."""
    result: dict[str, Any] = {"replays": replays}
    for rows in (1, 5, 16):
        step = DecodeStep("random:llama-3.2-1b", rows, 700)
        expected, graph_logits = None, None
        for pdl in (False, True):
            view = step.view(rows, pdl=pdl)
            with torch.inference_mode(), step.runtime.stream():
                logits = step.model.forward(view)
                step.runtime.synchronize()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode="thread_local")
                graph_logits = step.model.forward(view)
                graph.capture_end()
                if expected is None:
                    assert logits is not None
                    expected = logits.values.clone()
                assert graph_logits is not None
                different = torch.zeros((), dtype=torch.int64, device="cuda")
                for _ in range(replays if pdl else 3):
                    graph_logits.values.zero_()
                    graph.replay()
                    different += (graph_logits.values != expected).any()
                result[f"rows_{rows}_{'dependent' if pdl else 'plain'}_different"] = int(different)
    return result


def random_mixes(model: str, mixes: int) -> dict[str, Any]:
    """Requests of random lengths against a KV pool too small for them: chunks, preemptions, aborts; all must end and
    nothing may be left (the engine checks its blocks each time that it falls idle, and dies when one is lost)."""
    generator = random.Random(7)
    llm = LLM(model, device="cuda", max_model_len=600, max_num_seqs=16, kv_memory=96 << 20, prefill_tokens=256)
    vocab = llm.info.vocab_size
    finished = 0
    for _ in range(mixes):
        prompts = [
            {"prompt_token_ids": [generator.randrange(vocab) for _ in range(generator.choice((3, 40, 200, 500)))]}
            for _ in range(generator.randrange(4, 24))
        ]
        params = [
            SamplingParams(
                temperature=generator.choice((0.0, 0.8)),
                top_p=generator.choice((1.0, 0.9)),
                max_tokens=generator.choice((1, 17, 60, 90)),
                ignore_eos=True,
                seed=generator.randrange(1000),
                presence_penalty=generator.choice((0.0, 0.0, 0.5)),
                logprobs=generator.choice((None, None, 3)),
            )
            for _ in prompts
        ]
        outputs = llm.generate(prompts, params)
        for output, one in zip(outputs, params, strict=True):
            assert len(output.outputs[0].token_ids) == one.max_tokens, (output, one)
        finished += len(outputs)
    time.sleep(1)  # one idle turn, in which the blocks are checked
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=2, ignore_eos=True))
    llm.close()
    return {"mixes": mixes, "finished": finished}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model with a tokenizer, for the greedy texts; left out without")
    parser.add_argument("--mixes", type=int, default=30)
    parser.add_argument("--replays", type=int, default=1000)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    if arguments.model:
        result["greedy"] = greedy_against_cpu(arguments.model)
        print(json.dumps(result["greedy"]), flush=True)
    result["dependent_launches"] = dependent_launches(arguments.replays)
    print(json.dumps(result["dependent_launches"]), flush=True)
    result["random_mixes"] = random_mixes("random:smollm2-135m", arguments.mixes)
    print(json.dumps(result["random_mixes"]), flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
