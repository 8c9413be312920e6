"""``firsttoken eval``: how well a model predicts a text, and how far it is from another."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firsttoken.cli.bench_options import add_results, hand_in, say
from firsttoken.cli.options import add_engine_options, add_log_level, add_model_argument, engine_args, positive_int
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firsttoken.core.agreement import Guess

NAME = "eval"
HELP = "perplexity on a text, and agreement with another model or other weights"
EPILOG = """\
The text is read in windows of --context tokens. With --reference the same is asked of another model on the same
tokens: how often both have the same likeliest token, and the mean KL divergence over the reference's 20 likeliest.
--reference may be the same MODEL: it is computed with --reference-quantization, weights in full if left out.

examples:
  firsttoken eval smollm2 --text book.txt
  firsttoken eval ./model --text book.txt --quantization int4 --reference ./model
  firsttoken eval ./model-int4 --text book.txt --reference ./model --record-self-check
"""
_DEFAULT_CONTEXT, _DEFAULT_TOKENS = 512, 4096
# No text that is meant is larger; and no token stands for so many characters.
_MOST_BYTES, _CHARACTERS = 1 << 30, 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8; never what was calibrated on")
    parser.add_argument(
        "--reference", metavar="MODEL", help="another model of the same tokens, or the same one in full"
    )
    parser.add_argument(
        "--reference-quantization", default="none", metavar="NAME", help="of the reference's weights (default: none)"
    )
    parser.add_argument(
        "--context",
        type=positive_int,
        default=_DEFAULT_CONTEXT,
        metavar="TOKENS",
        help=f"of a window (default: {_DEFAULT_CONTEXT})",
    )
    parser.add_argument(
        "--tokens",
        type=positive_int,
        default=_DEFAULT_TOKENS,
        metavar="N",
        help=f"read at most so many of the text (default: {_DEFAULT_TOKENS:,})",
    )
    parser.add_argument(
        "--record-self-check",
        action="store_true",
        help="write into MODEL's folder what the reference (left out: MODEL itself) thinks of a few prompts; "
        "engines that load it compare themselves at their start",
    )
    add_results(parser)
    add_engine_options(
        parser, without=("served_model_name", "max_model_len", "seed", "targets", "batch_window", "chat_template")
    )
    add_log_level(parser, "warning")


def run(options: argparse.Namespace) -> int:
    from firsttoken.core.agreement import compare, perplexity

    args = engine_args(options)
    began = time.monotonic()
    text = read_text(options.text)
    head, tokens, guessed = _ask(args, text, options)
    result: dict[str, Any] = {
        **head,
        "text": options.text.name,
        "context": options.context,
        "tokens": len(guessed),
        "perplexity": perplexity(guessed),
        "reference": options.reference,
    }
    other = EngineArgs(
        model=options.reference or args.model,
        quantization=options.reference_quantization,
        device=args.device,
        threads=args.threads,
        offline=args.offline,
        revision=args.revision if options.reference is None else None,
        kv_memory=args.kv_memory,
        max_num_seqs=args.max_num_seqs,
    )
    if options.reference is not None:
        reference_head, reference_tokens, reference = _ask(other, text, options)
        if reference_tokens != tokens:
            raise ConfigError(f"{options.reference} has another tokenizer than {args.model}: they cannot be compared")
        result |= {
            "reference_quantization": reference_head["quantization"],
            "reference_dtype": reference_head["dtype"],
            "reference_perplexity": perplexity(reference),
            **compare(guessed, reference),
        }
    if options.record_self_check:
        result["self_check"] = _record(args.model, other)
    result["wall_s"] = round(time.monotonic() - began, 3)
    hand_in(options, result, _lines(result))
    return 0


def _record(model: str, reference: EngineArgs) -> dict[str, float]:
    """Into the folder; the figures of its own engine's check."""
    import msgspec

    from firsttoken.bench.self_check import record

    return msgspec.structs.asdict(record(Path(model), reference, say))


def read_text(path: Path) -> str:
    """UTF-8. Raises `ConfigError` for a file that cannot be read, or is too large to be meant."""
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise ConfigError(f"{path} is {size / 1e9:.1f} GB long, at most 1.1 are read: give a part of it")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error.reason} at byte {error.start})") from None


def _ask(
    args: EngineArgs, text: str, options: argparse.Namespace
) -> tuple[dict[str, Any], list[list[int]], Sequence[Guess]]:
    """The head of a result, the tokens in windows, and what the model thinks of them."""
    import msgspec

    from firsttoken.bench.accuracy import guesses, windows
    from firsttoken.cli import report
    from firsttoken.cli.progress import count_progress
    from firsttoken.frontend.llm import LLM

    given = msgspec.structs.asdict(args) | {"max_model_len": options.context}
    with LLM(**given) as llm:
        encoded = llm.get_tokenizer().encode(text[: options.tokens * _CHARACTERS], parse_special=False)
        tokens = windows(encoded[: options.tokens], options.context)
        total = sum(len(window) - 1 for window in tokens)
        with count_progress("positions", total) as update:
            found = guesses(llm, tokens, lambda done: update(done, f"by {args.model}"))
        return report.header(llm.info), tokens, found


def _lines(result: dict[str, Any]) -> list[str]:
    weights = f"{result['model']} ({result['quantization']}, {result['dtype']})"
    lines = [f"{weights}: perplexity {result['perplexity']:.4f} on {result['tokens']:,} tokens of {result['text']}"]
    if result["reference"] is not None:
        lines += [
            f"reference {result['reference']} ({result['reference_quantization']}, {result['reference_dtype']}): "
            f"perplexity {result['reference_perplexity']:.4f}",
            f"the same likeliest token at {result['top1_agreement']:.2%} of positions, KL {result['kl']:.5f} nats",
        ]
    if (checked := result.get("self_check")) is not None:
        lines.append(
            f"self-check recorded: the same likeliest token at {checked['top1_agreement']:.2%} of {checked['tokens']} "
            f"positions, KL {checked['kl']:.5f} nats"
        )
    return lines
