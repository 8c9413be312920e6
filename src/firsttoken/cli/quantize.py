"""``firsttoken quantize``: a model's layers in four or eight bits, calibrated on a text, as a folder to serve."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from firsttoken.cli.bench_options import add_results, hand_in, say
from firsttoken.cli.options import add_log_level, add_model_argument, add_revision, positive_int
from firsttoken.core.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from firsttoken.calibration.folder import LayerFigures
    from firsttoken.calibration.run import Done
    from firsttoken.checkpoint.checkpoint import Checkpoint
    from firsttoken.text.tokenizer import Tokenizer

NAME = "quantize"
HELP = "round a model's layers to four or eight bits, calibrated on a text"
EPILOG = """\
Each layer is rounded by the method that costs its output least on tokens held out; --method leaves fewer to choose
from: rtn (round to nearest), gptq, awq. A run that was stopped goes on where it was, with the same options.
The folder is in the layout of compressed-tensors; embeddings, norms and the head stay bfloat16.

examples:
  firsttoken quantize ./model --scheme int4 --out ./model-int4
  firsttoken quantize smollm2 --scheme int4 --group-size 64 --out ./smollm2-int4 --calibration book.txt
"""
_SCHEMES = ("int4", "fp8", "int8")
_METHODS = ("best", "rtn", "gptq", "awq")
_GROUPS = (128, 64, 32)
_CONTEXT = 512
# Tokens for each column of the widest linear: fewer, and second moments are noise.
_TOKENS_A_COLUMN, _FEWEST_TOKENS = 4, 16_384


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_revision(parser)
    parser.add_argument("--scheme", required=True, choices=_SCHEMES, help="what the layers' weights become")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder, or one that was begun")
    parser.add_argument(
        "--group-size",
        type=int,
        choices=_GROUPS,
        metavar="N",
        help="columns of a row that share a scale in int4: 128, 64 or 32 (default: the largest that divides all)",
    )
    parser.add_argument("--method", default="best", choices=_METHODS, help="of each layer (default: best)")
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="UTF-8 text, never what is evaluated on (default: the Python language reference)",
    )
    parser.add_argument(
        "--context", type=positive_int, default=_CONTEXT, metavar="TOKENS", help=f"of a window (default: {_CONTEXT})"
    )
    parser.add_argument(
        "--tokens",
        type=positive_int,
        metavar="N",
        help=f"of the text (default: {_TOKENS_A_COLUMN} for each column of the widest linear, {_FEWEST_TOKENS:,} at "
        "least)",
    )
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to compute (default: auto)"
    )
    parser.add_argument("--threads", type=positive_int, metavar="N", help="of the CPU that compute (default: all)")
    parser.add_argument("--offline", action="store_true", help="never fetch a model")
    parser.add_argument(
        "--self-check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="store what MODEL thinks of a few prompts, so that engines can tell a damaged folder (default: on)",
    )
    add_results(parser)
    add_log_level(parser, "warning")


def run(options: argparse.Namespace) -> int:
    from firsttoken.checkpoint.locate import open_checkpoint
    from firsttoken.text.tokenizer import Tokenizer

    began = time.monotonic()
    checkpoint = open_checkpoint(options.model, offline=options.offline, revision=options.revision)
    if checkpoint.tokenizer is None:
        raise ConfigError(f"{options.model} has no tokenizer, without which no text can be calibrated on")
    tokenizer = Tokenizer.build(checkpoint.tokenizer)
    windows = _windows(options, checkpoint, tokenizer)
    device = _device(options)
    try:
        done = _quantize(options, checkpoint, tokenizer, windows, device)
    except KeyboardInterrupt:
        _tell("stopped: the same command goes on after the last layer that was finished")
        raise
    try:
        checked = _record(options, device) if options.self_check else None
    except KeyboardInterrupt:
        _tell(f"stopped: {options.out} lacks only its self-check, which firsttoken eval --record-self-check writes")
        raise
    result = _result(options, done, device, windows.size, time.monotonic() - began) | {"self_check": checked}
    hand_in(options, result, _lines(result))
    return 0


def _tell(text: str) -> None:
    print(f"firsttoken {NAME}: {text}", file=sys.stderr)


def _windows(options: argparse.Namespace, checkpoint: Checkpoint, tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    from firsttoken.calibration.text import default_text, thinned, windows
    from firsttoken.cli.evaluate import read_text

    text = default_text() if options.calibration is None else read_text(options.calibration)
    config = checkpoint.config
    widest = max(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    tokens = options.tokens or max(_FEWEST_TOKENS, _TOKENS_A_COLUMN * widest)
    encoded = tokenizer.encode(thinned(text, tokens), parse_special=False)
    return windows(encoded, min(options.context, config.max_position), tokens)


def _device(options: argparse.Namespace) -> str:
    from firsttoken.devices.cuda import CUDADevice

    if options.device == "cpu":
        return "cpu"
    refusal = CUDADevice().refusal()
    if refusal is None:
        return "cuda"
    if options.device == "cuda":
        raise ConfigError(f"device 'cuda': {refusal}")
    return "cpu"


def _quantize(
    options: argparse.Namespace,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    windows: npt.NDArray[np.int64],
    device: str,
) -> Done:
    from firsttoken.calibration.run import Order, quantize
    from firsttoken.cli.progress import count_progress

    order = Order(options.scheme, options.method, options.group_size, windows, device, options.threads)
    text = tokenizer.to_json() if checkpoint.source == "gguf" else None
    with count_progress(f"quantizing {checkpoint.name}", checkpoint.config.num_layers) as update:
        return quantize(checkpoint, order, options.out, text, lambda index, figures: update(index + 1, _note(figures)))


def _record(options: argparse.Namespace, device: str) -> dict[str, float]:
    """What the folder's own engine makes of the prompts, beside MODEL in full."""
    from firsttoken.bench.self_check import record
    from firsttoken.core.engine_args import EngineArgs

    reference = EngineArgs(
        model=options.model,
        quantization="none",
        dtype="float32" if device == "cpu" else "auto",
        device=device,
        threads=options.threads,
        offline=options.offline,
        revision=options.revision,
    )
    return msgspec.structs.asdict(record(options.out, reference, say))


def _note(figures: tuple[LayerFigures, ...]) -> str:
    """Of one layer: its relative errors, and by which methods."""
    worst = max(figures, key=lambda figure: figure.relative)
    methods = ", ".join(sorted({figure.method for figure in figures}))
    return f"error of outputs up to {worst.relative:.2%} ({worst.name.rpartition('.')[2]}), by {methods}"


def _result(options: argparse.Namespace, done: Done, device: str, tokens: int, seconds: float) -> dict[str, Any]:
    from firsttoken.cli import report

    return report.header(
        model=options.model,
        device=device,
        scheme=options.scheme,
        group_size=done.group_size or None,
        method=options.method,
        calibration=None if options.calibration is None else options.calibration.name,
        tokens=tokens,
        out=options.out.name,
        layers=[msgspec.structs.asdict(figure) for figure in done.layers],
        bytes_before=done.bytes_before,
        bytes_after=done.bytes_after,
        wall_s=round(seconds, 3),
    )


def _lines(result: dict[str, Any]) -> list[str]:
    methods = Counter(layer["method"] for layer in result["layers"])
    relative = [layer["relative"] for layer in result["layers"]]
    counted = ", ".join(f"{method} {count}" for method, count in methods.most_common())
    return [
        f"{result['model']} is in {result['out']} as {result['scheme']}"
        + (f" in groups of {result['group_size']}" if result["group_size"] else ""),
        f"{len(relative)} linears by method: {counted}; error of outputs {sum(relative) / len(relative):.2%} in the "
        f"mean, {max(relative):.2%} at most",
        f"{result['bytes_before'] / 1e6:.1f} MB before, {result['bytes_after'] / 1e6:.1f} MB after, in "
        f"{result['wall_s']:.0f} s",
        *_checked(result["self_check"]),
    ]


def _checked(figures: dict[str, float] | None) -> list[str]:
    if figures is None:
        return []
    return [
        f"self-check: the same likeliest token as in full at {figures['top1_agreement']:.2%} of "
        f"{figures['tokens']} positions, KL {figures['kl']:.5f} nats"
    ]
