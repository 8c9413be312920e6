"""What few bits cost in answers: one model in full, and beside it rounded weights, rounded KV and quantised folders.

    python -m benchmarks.accuracy --model base30m --text base30m/held_out.txt --output accuracy.json \\
        --case int4 --case fp8 --case kv:fp8 --case kv:int4 --folder gptq=base30m-int4 --tokens 8192

A case is what `--quantization` takes, ``kv:`` and what `--kv-dtype` takes, or both as in ``int4+kv:fp8``. Each is read
as `firsttoken eval` reads, on the device of `--device`; the reference, weights in full and KV as the activations, is
read once. A case that the engine refuses is told with its words.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from firsttoken.bench.accuracy import guesses, windows
from firsttoken.cli import report
from firsttoken.core.agreement import Guess, compare, perplexity
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError
from firsttoken.frontend.llm import LLM

Windows = list[list[int]]


def read(args: EngineArgs, text: str, most: int) -> tuple[dict[str, Any], Windows, list[Guess]]:
    """The head of a result, the text's tokens in windows of the engine's length, and what it thinks of them."""
    assert args.max_model_len is not None
    with LLM(**msgspec.structs.asdict(args)) as llm:
        tokens = llm.get_tokenizer().encode(text, parse_special=False)[:most]
        found = windows(tokens, args.max_model_len)
        head = report.header(llm.info)
        if llm.info.self_check is not None:
            head["self_check"] = msgspec.structs.asdict(llm.info.self_check)
        return head, found, guesses(llm, found)


def case_args(base: EngineArgs, case: str) -> EngineArgs:
    """``int4``, ``kv:fp8`` or ``int4+kv:fp8``, on top of ``base``."""
    changes: dict[str, str] = {}
    for part in case.split("+"):
        changes["kv_dtype" if part.startswith("kv:") else "quantization"] = part.removeprefix("kv:")
    # Types that are chosen with the weights: what is fastest for rounded ones need not be for those in full.
    return msgspec.structs.replace(base, **({"dtype": "auto"} if "quantization" in changes else {}), **changes)


def folder_args(base: EngineArgs, folder: str) -> EngineArgs:
    return msgspec.structs.replace(base, model=folder, quantization="auto", dtype="auto")


def figures(
    name: str, args: EngineArgs, text: str, most: int, reference: tuple[Windows, list[Guess]]
) -> dict[str, Any]:
    """Of one case; its engine's words where it refuses."""
    tokens, expected = reference
    began = time.monotonic()
    try:
        head, found, guessed = read(args, text, most)
    except ConfigError as error:
        return {"case": name, "refused": str(error)}
    if found != tokens:
        raise ConfigError(f"{args.model} has another tokenizer: it cannot be compared")
    apart = [theirs.logprob - ours.logprob for ours, theirs in zip(guessed, expected, strict=True)]
    return {
        "case": name,
        **{key: head[key] for key in ("dtype", "quantization", "kv_dtype", "self_check") if key in head},
        "perplexity": perplexity(guessed),
        "perplexity_change": perplexity(guessed) / perplexity(expected) - 1,
        # One standard deviation of that, as far as one position's loss says nothing of another's.
        "perplexity_change_error": statistics.stdev(apart) / len(apart) ** 0.5,
        **compare(guessed, expected),
        "wall_s": round(time.monotonic() - began, 1),
    }


def line(case: dict[str, Any]) -> str:
    if "refused" in case:
        return f"{case['case']}: refused: {case['refused']}"
    return (
        f"{case['case']}: perplexity {case['perplexity']:.4f} ({case['perplexity_change']:+.2%}, give or take "
        f"{case['perplexity_change_error']:.2%}), the same likeliest "
        f"token {case['top1_agreement']:.2%}, KL {case['kl']:.5f}, {case['wall_s']} s"
    )


def _named(given: str) -> tuple[str, str]:
    """A folder's name in the result, and its own."""
    name, _, path = given.partition("=")
    return name, Path(path).name


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="of the reference and of cases that only change the KV")
    parser.add_argument("--context", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=8192, metavar="N")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--case", action="append", default=[], metavar="NAME")
    parser.add_argument("--folder", action="append", default=[], metavar="NAME=PATH")
    options = parser.parse_args(argv)
    base = EngineArgs(
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        quantization="none",
        max_model_len=options.context,
        threads=options.threads,
        offline=True,
    )
    wanted = [(case, case_args(base, case)) for case in options.case]
    for given in options.folder:
        name, _, path = given.partition("=")
        wanted.append((name, folder_args(base, path)))
    text = options.text.read_text(encoding="utf-8")
    head, tokens, expected = read(base, text, options.tokens)
    # A result names files, not where they lay on the machine that made it.
    words = [f"--case {case}" for case in options.case]
    words += ["--folder {}={}".format(*_named(given)) for given in options.folder]
    words += [
        f"--context {options.context} --tokens {options.tokens} --device {head['device']} --dtype {options.dtype}"
    ]
    command = f"python -m benchmarks.accuracy --model {Path(options.model).name} --text {options.text.name}"
    result = head | {
        "command": " ".join([command, *words]),
        "text": options.text.name,
        "context": options.context,
        "tokens": len(expected),
        "perplexity": perplexity(expected),
        "cases": [],
    }
    told = f"{head['model']} in {head['dtype']}: perplexity {result['perplexity']:.4f} on {len(expected):,} tokens"
    print(told, flush=True)
    for name, args in wanted:
        found = figures(name, args, text, options.tokens, (tokens, expected))
        print(line(found), flush=True)
        result["cases"].append(found)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
