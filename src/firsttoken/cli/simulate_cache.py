"""``firsttoken simulate cache``: what eviction policies find again, on traces and made-up conversations."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firsttoken.cli.bench_options import hand_in, natural_number, positive_number, say, share, write_result
from firsttoken.cli.options import positive_int, whole_int
from firsttoken.core.errors import ConfigError

if TYPE_CHECKING:
    from firsttoken.simulate.workload import Job

NAME = "cache"
HELP = "what eviction policies find again of the prompts of a load"
DEFAULT_BLOCKS = "1000,3000,10000,30000"
DEFAULT_SECONDS = 1800.0
EPILOG = """\
A block is 512 tokens, as in Mooncake's traces, and is found when all blocks before it in its prompt are. hit_ratio is
blocks found / blocks of all prompts. With several classes it is told for each, beside what the class finds alone.

policies: default (the engine's), lru, lfu (with ghosts), arc, s3fifo, hybrid (uses in a window, age by class),
clairvoyant (knows what comes: the bound), or all

examples:
  firsttoken simulate cache --trace mooncake_conversation_trace.jsonl --policy all
  firsttoken simulate cache --trace mooncake_conversation_trace.jsonl --blocks 10000 --p0 5% --flood 4
  firsttoken simulate cache --sessions 2 --seconds 3600 --seed 7 --policy default,lru --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, metavar="FILE", help="requests with hash_ids, as Mooncake publishes them")
    parser.add_argument(
        "--sessions", type=positive_number, metavar="R", help="R conversations a second begin at random"
    )
    parser.add_argument(
        "--seconds",
        type=positive_number,
        metavar="S",
        help=f"how long --sessions go on (default: {DEFAULT_SECONDS:g}), or how much of the trace (default: all)",
    )
    parser.add_argument("--blocks", default=DEFAULT_BLOCKS, metavar="N,..", help=f"sizes (default: {DEFAULT_BLOCKS})")
    parser.add_argument("--policy", default="default", metavar="NAME,..|all", help="see below (default: default)")
    parser.add_argument(
        "--p0", type=share, default=0.0, metavar="SHARE", help="of conversations, to be p0 (default: 0)"
    )
    parser.add_argument(
        "--flood",
        type=natural_number,
        default=0.0,
        metavar="X",
        help="blocks of one-off p2 prompts for each other block",
    )
    parser.add_argument("--seed", type=whole_int, default=1, metavar="N", help="of all that is random (default: 1)")
    parser.add_argument("--json", action="store_true", help="a JSON list on stdout, an entry a policy and size")
    parser.add_argument(
        "--output", dest="output_json", type=Path, metavar="FILE", help="write them to this file, with a head"
    )


def run(options: argparse.Namespace) -> int:
    from firsttoken.cli import report
    from firsttoken.simulate.cache_compare import compare_cache, named_policies

    names = named_policies(options.policy)
    sizes = _sizes(options.blocks)
    jobs = _jobs(options)
    entries = []
    for name in names:
        for blocks in sizes:
            say(f"{name}, {blocks} blocks: {len(jobs)} requests")
            entries.append(compare_cache(jobs, name, blocks))
    if options.output_json is not None:
        head = report.header(
            trace=None if options.trace is None else options.trace.name,
            sessions=options.sessions,
            seconds=options.seconds,
            p0=options.p0,
            flood=options.flood,
            seed=options.seed,
            requests=len(jobs),
            prompt_blocks=sum(len(job.blocks) for job in jobs),
        )
        write_result(options.output_json, {**head, "results": entries})
        options.output_json = None
    hand_in(options, entries, _lines(entries))
    return 0


def _sizes(text: str) -> list[int]:
    try:
        return [positive_int(word) for word in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--blocks: {error}") from None


def _jobs(options: argparse.Namespace) -> list[Job]:
    from firsttoken.simulate.cache_loads import session_jobs, with_flood, with_p0
    from firsttoken.simulate.traces import read_trace
    from firsttoken.simulate.workload import within

    if (options.trace is None) == (options.sessions is None):
        raise ConfigError("say which load: --trace or --sessions")
    if options.p0 > 1:
        raise ConfigError(f"--p0 is a share of the conversations, at most 1, got {options.p0:g}")
    if options.trace is not None:
        jobs = read_trace(options.trace)
        jobs = jobs if options.seconds is None else within(jobs, options.seconds)
    else:
        options.seconds = options.seconds or DEFAULT_SECONDS
        jobs = session_jobs(options.sessions, options.seconds, options.seed)
    if not any(job.blocks for job in jobs):
        raise ConfigError("no prompt of the load has hash_ids (as Azure's have none): nothing could be found again")
    if options.p0:
        jobs = with_p0(jobs, options.p0, options.seed)
    return with_flood(jobs, options.flood, options.seed) if options.flood else jobs


def _lines(entries: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'policy':<12}{'blocks':>9}{'hit ratio':>11}   by class (of what it finds alone)"
    for entry in entries:
        classes = [
            f"{name} {100 * found['hit_ratio']:.1f} % ({_percent(found['kept'])})"
            for name, found in entry.get("classes", {}).items()
        ]
        line = f"{entry['policy']:<12}{entry['blocks']:>9}{100 * entry['hit_ratio']:>9.2f} %   {', '.join(classes)}"
        yield line.rstrip()


def _percent(kept: float | None) -> str:
    return "-" if kept is None else f"{100 * kept:.0f} %"
