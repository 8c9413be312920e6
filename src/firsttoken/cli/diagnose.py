"""``firsttoken diagnose``: where the time of a server's answers goes, and which layer is at fault."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firsttoken.cli.bench_options import add_results, duration_ms, hand_in, natural_number, share
from firsttoken.cli.options import natural_int, positive_int, whole_int
from firsttoken.cli.streams import is_terminal
from firsttoken.core.errors import ConfigError

if TYPE_CHECKING:
    from firsttoken.diagnose.probe import Probe
    from firsttoken.diagnose.references import Reference

NAME = "diagnose"
HELP = "where the time of any OpenAI-compatible server's answers goes, and which layer is at fault"
EPILOG = """\
Sends --requests streamed chat completions, one at a time, each on a connection of its own, and times every phase;
then prompts of several lengths, and several requests at once. --gpu and --parameters say what hardware and model
stand behind the server, so that prefill and decode can be held against the hardware's roofs.
Exit code 1: a target was missed, a request failed, or the server could not be asked.

examples:
  firsttoken diagnose http://127.0.0.1:8000
  firsttoken diagnose https://api.example.com/v1 --model llama --api-key "$KEY" --ttft-p99 80ms --e2e-p99 387ms
  firsttoken diagnose http://gpu7:8000 --gpu h200 --parameters 8B --html report.html
"""
_LINE_EVERY_S = 10.0
_LARGEST_CROWD, _LONGEST_PROMPT = 256, 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the server's address, with or without /v1")
    parser.add_argument("--model", metavar="NAME", help="which one to ask (default: the first that the server lists)")
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    add = parser.add_argument
    add("--requests", type=positive_int, default=20, metavar="N", help="requests at a pace (default: 20)")
    add("--pause", type=duration_ms, default=50.0, metavar="TIME", help="between them (default: 50ms)")
    add("--prompt-tokens", type=positive_int, default=128, metavar="N", help="of each, about (default: 128)")
    add("--shared", type=share, default=0.5, metavar="SHARE", help="of the prompts that all begin with (default: 50%%)")
    add("--max-tokens", type=positive_int, default=32, metavar="N", help="of each answer (default: 32)")
    add("--reuse", action="store_true", help="keep one connection for them all")
    add("--sweep-prompts", type=_lengths, default="16,256,1024", metavar="N,..", help="(default: 16,256,1024)")
    add("--sweep-concurrency", type=_counts, default="1,2,4,8", metavar="N,..", help="(default: 1,2,4,8)")
    add("--no-sweep", action="store_true", help="leave the sweeps out")
    add("--gpu", metavar="NAME", help="that the model runs on: h200, h100, a100, l40s, l4")
    add("--gpus", type=positive_int, default=1, metavar="N", help="that compute one token together (default: 1)")
    add("--parameters", type=_parameters, metavar="SIZE", help="of the model, active ones, as in 8B")
    add("--weight-bits", type=positive_int, default=16, metavar="N", help="of each parameter (default: 16)")
    add("--ca-file", type=Path, metavar="FILE", help="certificates to trust (PEM; default: the system's)")
    add("--insecure", action="store_true", help="accept any certificate")
    add("--timeout", type=duration_ms, default=60e3, metavar="TIME", help="without a byte (default: 60s)")
    add("--seed", type=whole_int, default=0, metavar="N", help="of pauses and prompts (default: 0)")
    add("--ttft-p99", type=duration_ms, metavar="TIME", help="target for the first token, as in 80ms")
    add("--e2e-p99", type=duration_ms, metavar="TIME", help="target for the whole answer, as in 387ms")
    add("--html", type=Path, metavar="FILE", help="write the report as one page")
    add_results(parser)


def run(options: argparse.Namespace) -> int:
    from firsttoken.cli import report
    from firsttoken.diagnose.report import Targets, diagnosis
    from firsttoken.diagnose.session import Session, SessionConfig

    reference = _reference(options)
    probe = _probe(options)
    config = SessionConfig(
        model=options.model,
        requests=options.requests,
        pause_ms=options.pause,
        prompt_tokens=options.prompt_tokens,
        shared=options.shared,
        max_tokens=options.max_tokens,
        reuse=options.reuse,
        sweep_prompts=() if options.no_sweep else options.sweep_prompts,
        sweep_concurrency=() if options.no_sweep else options.sweep_concurrency,
        seed=options.seed,
    )
    runs = Session(probe, config, _Progress().say).run()
    targets = Targets(options.ttft_p99, options.e2e_p99)
    # The command line holds the key: the object names the URL instead.
    head = report.header(command=f"firsttoken diagnose {probe.endpoint}", url=str(probe.endpoint))
    result = {**head, **diagnosis(runs, reference, targets)}
    if options.html is not None:
        _write_page(options.html, result)
    from firsttoken.diagnose.terminal import lines

    hand_in(options, result, lines(result))
    missed = any(not target["met"] for target in result["targets"].values())
    return 1 if missed or runs.failures else 0


def _probe(options: argparse.Namespace) -> Probe:
    from firsttoken.core.tls import client_context
    from firsttoken.diagnose.endpoint import Endpoint
    from firsttoken.diagnose.probe import Probe

    endpoint = Endpoint.parse(options.url)
    key = options.api_key
    if key is not None and not (key.isascii() and key.isprintable() and key):
        raise ConfigError("--api-key holds signs that no HTTP header may have, or nothing")
    ca_file = None if options.ca_file is None else str(options.ca_file)
    context = client_context(ca_file, verify=not options.insecure) if endpoint.secure else None
    return Probe(endpoint, context, key, options.timeout / 1e3)


def _reference(options: argparse.Namespace) -> Reference:
    from firsttoken.diagnose.references import GPUS, Reference, roofs

    if options.gpu is not None and options.gpu.lower() not in GPUS:
        raise ConfigError(f"--gpu {options.gpu!r:.40} is not known: name one of {', '.join(GPUS)}, or leave it out")
    if (options.gpu is None) != (options.parameters is None):
        raise ConfigError("--gpu and --parameters belong together: a roof needs both")
    if options.gpu is None:
        return Reference()
    return roofs(options.gpu.lower(), options.parameters, options.weight_bits, options.gpus)


def _parameters(text: str) -> float:
    factor = {"b": 1e9, "m": 1e6}.get(text[-1:].lower())
    if factor is None:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no size of a model: write it as in 8B or 135M")
    number = natural_number(text[:-1])
    if number == 0 or not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no size of a model: it must be more than 0")
    return number * factor


def _lengths(text: str) -> tuple[int, ...]:
    return _numbers(text, _LONGEST_PROMPT)


def _counts(text: str) -> tuple[int, ...]:
    return _numbers(text, _LARGEST_CROWD)


def _numbers(text: str, most: int) -> tuple[int, ...]:
    found = tuple(natural_int(word) for word in text.split(","))
    if min(found) < 1 or max(found) > most:
        raise argparse.ArgumentTypeError(f"{text!r:.80} holds a number that is not in 1 to {most}")
    return found


def _write_page(path: Path, result: dict[str, Any]) -> None:
    from firsttoken.diagnose.html import page

    try:
        path.write_text(page(result), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


class _Progress:
    """What is going on: at a terminal one line that the next overwrites, elsewhere a line now and then."""

    def __init__(self) -> None:
        self._terminal = is_terminal(sys.stderr)
        self._began = self._written = time.monotonic()

    def say(self, text: str) -> None:
        if self._terminal:
            print(f"\r{text:<40}\r", end="", file=sys.stderr, flush=True)
            return
        now = time.monotonic()
        if now - self._written >= _LINE_EVERY_S:
            self._written = now
            print(f"{now - self._began:.0f} s: {text}", file=sys.stderr, flush=True)
