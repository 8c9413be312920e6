"""What rounded weights are worth at 8B: FP8 beside transformers in bfloat16, INT4 beside our own bfloat16, in one run.

    python -m benchmarks.gpu.rounded_ratios --output rounded_ratios.json [--only transformers int4]
    python -m benchmarks.gpu.rounded_ratios --model random:smollm2-135m --device cpu --fp8 none --int4 packed --repeat 1

Decode tokens/s of transformers: batch x (output - 1) over the time of ``generate`` less that of one with a single
token, medians of ``--repeat``, greedy, by eager attention and by sdpa, of which the faster counts. Ours: batch over the
median gap of `firsttoken bench latency`. ``weights_mib`` are what `firsttoken plan` says (benchmarks.gpu.plan checks it
against engines), ``peak_memory_gib`` what each engine held, with the same KV memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.cli import report

LIMIT_S = 300
KV_MEMORY = "2GiB"
PARTS = ("transformers", "int4")


def run_json(words: list[str]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", *words], stdout=subprocess.PIPE, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with code {done.returncode}: its last words are above")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def ours(options: argparse.Namespace, quantization: str, batch: int) -> dict[str, Any]:
    words = ["firsttoken.cli.main", "bench", "latency", options.model, "--quantization", quantization, "--json"]
    words += ["--device", options.device, "--batch", str(batch), "--repeat", str(options.repeat + 1), "--warmup", "2"]
    words += ["--input", str(options.input), "--output", str(options.output_tokens), "--kv-memory", KV_MEMORY]
    words += ["--max-model-len", str(options.input + options.output_tokens + 16)]
    found = run_json(words)
    gap = found["tpot_ms"]["p50"]
    kept = ("quantization", "dtype", "tpot_ms", "ttft_ms", "peak_memory_gib", "start_s", "captured_share")
    return {name: found[name] for name in kept} | {"batch": batch, "decode_tokens_per_s": batch * 1e3 / gap}


def weights_mib(options: argparse.Namespace, quantization: str) -> int:
    gpu = "cpu" if options.device == "cpu" else options.gpu
    words = ["firsttoken.cli.main", "plan", options.model, "--gpu", gpu, "--quantization", quantization, "--json"]
    return int(run_json([*words, "--context", "1024", "--users", "1"])["weights_mib"])


# --------------------------------------------------------------------- transformers


def theirs(options: argparse.Namespace, attention: str) -> dict[str, Any]:
    """In a process of its own, whose memory ends with it."""
    words = ["benchmarks.gpu.rounded_ratios", "--model", options.model, "--device", options.device]
    words += ["--input", str(options.input), "--output-tokens", str(options.output_tokens)]
    words += ["--batch", str(options.batch), "--repeat", str(options.repeat), "--theirs", attention]
    return run_json(words)


def generate(options: argparse.Namespace, attention: str) -> dict[str, Any]:
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() and options.device != "cpu" else "cpu"
    model = make_model(options.model, attention, device)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 30_000, (options.batch, options.input), generator=generator).to(device)

    def timed(tokens: int) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
                eos_token_id=None,
            )
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        assert out.shape[1] == options.input + tokens
        return seconds

    return {
        "attention": attention,
        "transformers": transformers.__version__,
        "batch": options.batch,
        **decode_rate(timed, options),
    }


def make_model(name: str, attention: str, device: str) -> Any:
    """Random weights in bfloat16, made on the device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = open_checkpoint(name).config
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position,
        rms_norm_eps=shape.rms_norm_eps,
        tie_word_embeddings=shape.tie_word_embeddings,
        attn_implementation=attention,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def decode_rate(timed: Callable[[int], float], options: argparse.Namespace) -> dict[str, Any]:
    timed(2)
    timed(options.output_tokens)
    first = [timed(1) for _ in range(options.repeat)]
    whole = [timed(options.output_tokens) for _ in range(options.repeat)]
    seconds = statistics.median(whole) - statistics.median(first)
    return {
        "first_token_s": first,
        "whole_s": whole,
        "decode_tokens_per_s": options.batch * (options.output_tokens - 1) / seconds,
    }


# --------------------------------------------------------------------- the run


def beside_transformers(options: argparse.Namespace) -> dict[str, Any]:
    others = [theirs(options, attention) for attention in ("sdpa", "eager")]
    mine = ours(options, options.fp8, options.batch)
    best = max(one["decode_tokens_per_s"] for one in others)
    return {"theirs": others, "ours": mine, "tokens_per_s_ratio": mine["decode_tokens_per_s"] / best}


def beside_bfloat16(options: argparse.Namespace) -> dict[str, Any]:
    full, rounded = ours(options, "none", 1), ours(options, options.int4, 1)
    full["weights_mib"], rounded["weights_mib"] = weights_mib(options, "none"), weights_mib(options, options.int4)
    return {
        "full": full,
        "rounded": rounded,
        "tokens_per_s_ratio": rounded["decode_tokens_per_s"] / full["decode_tokens_per_s"],
        "weight_memory_ratio": rounded["weights_mib"] / full["weights_mib"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:llama-3.1-8b", help="a Llama shape")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--gpu", default="h200", help="of the plan")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--fp8", default="fp8", help="the rounding beside transformers")
    parser.add_argument("--int4", default="int4", help="the rounding beside bfloat16")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--theirs", choices=("sdpa", "eager"), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.theirs is not None:
        print(json.dumps(generate(options, options.theirs)))
        return 0
    found = report.header(model=options.model, input=options.input, output=options.output_tokens)
    found["versions"] = report.versions("transformers")
    if "transformers" in options.only:
        found["fp8_beside_transformers"] = beside_transformers(options)
    if "int4" in options.only:
        found["int4_beside_bfloat16"] = beside_bfloat16(options)
    text = json.dumps(found, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
