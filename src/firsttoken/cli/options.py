"""Options that several commands share, read off the structs that they fill: one source for names and defaults."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from firsttoken.core.duration import milliseconds
from firsttoken.core.engine_args import DEFAULT_MODEL, EngineArgs
from firsttoken.core.errors import ConfigError
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import Targets
from firsttoken.core.targets_file import read_targets
from firsttoken.observability.logging import setup_logging

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)
# What a message between processes can hold.
MAX_NUMBER = 2**63 - 1
NO_FOLDER = "none"
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wider option column, examples kept as written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=110)


# ---------------------------------------------------------------- values


def size(text: str) -> int:
    """Bytes from ``2GiB``, ``512 MB``, ``1.5g`` or a plain number; K, M, G, T alone are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write bytes, or a number with KiB, MiB, GiB")
    number, unit, binary = match.groups(default="")
    decimal = text.strip().lower().endswith("b") and not binary
    exact = float(number) * (1000 if decimal else 1024) ** _POWERS[unit.lower()]
    if exact > MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a size: no machine has that much")
    value = int(exact)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: it must be more than 0 bytes")
    return value


def positive_int(text: str) -> int:
    """A whole number, 1 or more."""
    return _whole(text, 1)


def whole_int(text: str) -> int:
    """A whole number of either sign."""
    return _whole(text, -MAX_NUMBER - 1)


def natural_int(text: str) -> int:
    """A whole number, 0 or more."""
    return _whole(text, 0)


def _whole(text: str, low: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a whole number") from None
    if value < low:
        raise argparse.ArgumentTypeError(f"{text:.80} is too small: it must be {low} or more")
    if value > MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"{text:.80} is too large")
    return value


def port(text: str) -> int:
    """A TCP port; 0 takes a free one."""
    value = natural_int(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port: they end at 65535")
    return value


def targets(path: str) -> Targets:
    """What the file of that path says; raises ``ArgumentTypeError``."""
    try:
        return read_targets(path)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def eviction(text: str) -> str:
    """A policy's name."""
    from firsttoken.kvcache.eviction import POLICY_NAMES

    if text not in POLICY_NAMES:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no eviction policy: known are {', '.join(POLICY_NAMES)}")
    return text


def batch_window(text: str) -> str:
    """A time, 0 or a name, as `scheduler.window` has them."""
    if text not in ("0", "adaptive", "predicted"):
        try:
            milliseconds(text)
        except ValueError:
            words = f"{text!r:.80} is no batch window: give a time as in 2ms, adaptive or predicted"
            raise argparse.ArgumentTypeError(words) from None
    return text


# ---------------------------------------------------------------- engine


@dataclass(frozen=True, slots=True)
class Option:
    """How a struct's field looks on the command line."""

    help: str
    parse: Any = str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None


ENGINE_OPTIONS: dict[str, Option] = {
    "revision": Option("branch, tag or commit of a hub's repository (default: its main branch)", metavar="REV"),
    "served_model_name": Option("name that clients use for the model (default: the model's own)", metavar="NAME"),
    "device": Option("where to compute: cpu, cuda, or a registered device (default: auto)", metavar="DEVICE"),
    "dtype": Option(
        "type of activations and unpacked weights (default: auto)", choices=("auto", "float32", "bfloat16")
    ),
    "quantization": Option(
        "none: weights in full; packed: in the forms that are fastest on the CPU; int4, int8 (CPU) and fp8 (GPU): "
        "rounded while they are loaded (default: auto)",
        choices=("auto", "none", "packed", "int4", "int8", "fp8"),
    ),
    "kv_dtype": Option(
        "type of the KV cache; int8 (the more exact) and fp8 take half of bfloat16, int4 about a quarter (default: "
        "auto, as the activations)",
        choices=("auto", "float32", "bfloat16", "int8", "fp8", "int4"),
    ),
    "max_model_len": Option("longest prompt and answer together (default: the model's)", positive_int, "TOKENS"),
    "max_num_seqs": Option("requests computed at the same time (default: 64)", positive_int, "N"),
    "kv_memory": Option("memory of the KV cache, as in 2GiB (default: by what is free)", size, "SIZE"),
    "kv_host_memory": Option("host memory for KV that the cache evicts, as in 64GiB (default: none)", size, "SIZE"),
    "kv_disk": Option("folder for KV files, kept over restarts; needs --kv-host-memory (default: none)", str, "FOLDER"),
    "kv_disk_size": Option("most that those files take; needs --kv-disk (default: 32GiB)", size, "SIZE"),
    "kv_eviction": Option(
        "what the KV cache evicts first: default, lru, lfu, arc, s3fifo or hybrid", eviction, "POLICY"
    ),
    "prefix_caching": Option("reuse KV of equal prompt beginnings (default: on)", bool),
    "prefill_tokens": Option("prompt tokens in a step without decoding (default: auto)", positive_int, "TOKENS"),
    "mixed_prefill_tokens": Option("prompt tokens in a step that also decodes (default: auto)", positive_int, "TOKENS"),
    "in_flight": Option("steps submitted before the first one's result is read (default: auto)", positive_int, "N"),
    "threads": Option("CPU threads that compute (default: one a core that others leave)", positive_int, "N"),
    "batch_window": Option(
        "how long a prompt waits for others to join its step: a time, adaptive or predicted (default: 0)",
        batch_window,
        "TIME|NAME",
    ),
    "deterministic": Option("equal bits whatever else is in the batch; slower, GPU only (default: off)", bool),
    "engine_core": Option("processor that the engine's own thread keeps to (default: any)", natural_int, "CORE"),
    "targets": Option("promises of service classes and rules of API keys, from a TOML file", targets, "FILE"),
    "seed": Option("where the random choices of requests without a seed start from (default: 0)", whole_int, "N"),
    "flight_dir": Option("folder where the flight recorder writes, or none (docs/flight-recorder.md)", str, "FOLDER"),
    "self_check": Option("compare logits with the reference in the model's folder, if it has one (default: on)", bool),
    "pooling": Option(
        "embeddings: the mean of a prompt's hidden states, or its last one (default: auto, as the model's folder says)",
        choices=("auto", "mean", "last"),
    ),
    "chat_template": Option("chat template (Jinja) in the place of the model's own", metavar="FILE"),
    "offline": Option("never use the network; fail if a file is missing (default: off)", bool),
}


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """The positional MODEL."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=f"what to run (default: {DEFAULT_MODEL})"
    )


def add_revision(parser: argparse.ArgumentParser) -> None:
    """That of `EngineArgs`, for a command without the rest; None where it is not given."""
    parser.add_argument("--revision", metavar="REV", help=ENGINE_OPTIONS["revision"].help)


def add_engine_options(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = ()) -> None:
    """One option for each field of `EngineArgs`. Those not given stay absent, so that defaults have one home."""
    group = parser.add_argument_group("engine")
    for name, option in ENGINE_OPTIONS.items():
        if name not in without:
            _add_option(group, name, option)


def engine_args(options: argparse.Namespace) -> EngineArgs:
    """`EngineArgs` from what was given; raises `ConfigError`."""
    given = {name: getattr(options, name) for name in EngineArgs.__struct_fields__ if hasattr(options, name)}
    if given.get("flight_dir") == NO_FOLDER:
        given["flight_dir"] = None
    try:
        args = msgspec.convert(given, EngineArgs)
        args.check_tiers()
        return args
    except msgspec.ValidationError as error:
        raise ConfigError(f"engine options: {error}") from None


def add_log_level(parser: argparse.ArgumentParser, default: str) -> None:
    """``--log-level`` and ``--log-format``; logs go to stderr. Absent when not given: ``default`` is for the help."""
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=argparse.SUPPRESS,
        help=f"how much to log on stderr (default: {default})",
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default=argparse.SUPPRESS,
        help="lines for people, or one JSON object each (default: text)",
    )


def set_up_logging(options: argparse.Namespace, default: str) -> None:
    """As these options say; ``default`` is the level without any."""
    json_lines = getattr(options, "log_format", "text") == "json"
    setup_logging(getattr(options, "log_level", default), json_lines=json_lines)


# ---------------------------------------------------------------- sampling

# Where parsed sampling values lie: "seed" is a field of both structs.
_SAMPLING = "sampling_"

SAMPLING_OPTIONS: dict[str, Option] = {
    "max_tokens": Option("longest answer", positive_int, "TOKENS"),
    "temperature": Option("0 takes the likeliest token (default: the model's own, else 0)", float, "T"),
    "top_p": Option("keep the likeliest tokens up to this probability", float, "P"),
    "top_k": Option("keep the K likeliest tokens; 0 keeps all", int, "K"),
    "min_p": Option("drop tokens below this share of the likeliest one's probability", float, "P"),
    "presence_penalty": Option("from -2 to 2; lowers tokens that occurred", float, "X"),
    "frequency_penalty": Option("from -2 to 2; lowers tokens by how often they occurred", float, "X"),
    "repetition_penalty": Option("more than 1 lowers tokens of prompt and answer", float, "X"),
    "stop": Option("end the answer before this text (may be repeated)", metavar="TEXT"),
    "min_tokens": Option("no end before this many tokens", natural_int, "TOKENS"),
    "seed": Option("repeat the same random choices", int, "N"),
    "ignore_eos": Option("go on past the model's end token (default: off)", bool),
}


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Options that become fields of `SamplingParams`; not given means the model's default, and ``max_tokens``."""
    group = parser.add_argument_group("sampling")
    for name, option in SAMPLING_OPTIONS.items():
        if name == "max_tokens":
            option = replace(option, help=f"{option.help} (default: {max_tokens})")
        _add_option(group, name, option, dest=_SAMPLING + name)


def sampling_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields that were given, by `SamplingParams`' names. Raises `InvalidRequest` for a wrong value."""
    given = vars(options)
    fields = {name: given[_SAMPLING + name] for name in SAMPLING_OPTIONS if _SAMPLING + name in given}
    SamplingParams(**fields)
    return fields


def _add_option(group: argparse._ArgumentGroup, name: str, option: Option, *, dest: str | None = None) -> None:
    flag = "--" + name.replace("_", "-")
    common: dict[str, Any] = {"help": option.help, "default": argparse.SUPPRESS, "dest": dest or name}
    if option.parse is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif name == "stop":
        group.add_argument(flag, action="append", metavar=option.metavar, **common)
    else:
        group.add_argument(flag, type=option.parse, metavar=option.metavar, choices=option.choices, **common)
