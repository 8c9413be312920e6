"""``firsttoken plan``: what a model will take of a machine's memory, before anything is loaded."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from typing import TYPE_CHECKING, Any

from firsttoken.cli.options import (
    add_engine_options,
    add_log_level,
    add_model_argument,
    engine_args,
    positive_int,
    size,
)
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError

if TYPE_CHECKING:
    from firsttoken.engine.memory_plan import Fit, Machine
    from firsttoken.executor.ahead.gpus import GPU

NAME = "plan"
HELP = "say what a model takes of a GPU's or this machine's memory, and what fits, before loading"
EPILOG = """\
The figures are those of an engine that computes --users requests at once, each of --context tokens, prompt and
answer. Exit code 1: it does not fit, or no engine runs there.

examples:
  firsttoken plan random:llama-3.1-8b --gpu h200 --context 8192 --users 16
  firsttoken plan ./model --gpu 24GB --context 4096 --json
  firsttoken plan smollm2 --gpu cpu --context 2048 --users 4
"""
MIB = 1 << 20
GIB = 1 << 30
# Plans are meant to be this close.
TOLERANCE = 0.03
_KEPT = ("dtype", "quantization", "kv_dtype", "deterministic", "offline", "revision")
# Of a GPU that is known by its size alone.
_GENERATION = "sm90"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--gpu",
        metavar="GPU|SIZE|cpu",
        help="h200, h100, ...; any GPU by its memory, as in 24GB; or cpu, for this machine's (default: the GPU that is "
        "here, else cpu)",
    )
    parser.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="as of serve: cpu is --gpu cpu, cuda the GPU that is here or that --gpu names (default: auto)",
    )
    parser.add_argument(
        "--context", type=positive_int, metavar="TOKENS", help="of each request (default: the model's own limit)"
    )
    parser.add_argument("--users", type=positive_int, default=1, metavar="N", help="requests at once (default: 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_engine_options(parser, without=tuple(name for name in EngineArgs.__struct_fields__ if name not in _KEPT))
    add_log_level(parser, "warning")


def run(options: argparse.Namespace) -> int:
    from firsttoken.checkpoint.locate import open_checkpoint
    from firsttoken.cli import report
    from firsttoken.engine.memory_plan import MOST_USERS, GPUMachine, plan_memory, rounded_to_fit

    args = engine_args(options)
    if options.users > MOST_USERS:
        raise ConfigError(
            f"users may be at most {MOST_USERS} (an engine computes no more at once), got {options.users}"
        )
    checkpoint = open_checkpoint(args.model, offline=args.offline, revision=args.revision)
    context = options.context or checkpoint.config.max_position
    machine = find_machine(_machine_name(options.gpu, options.device), args)
    fit = plan_memory(args, checkpoint, machine, context, options.users)
    figures = _figures(fit)
    rounded = None
    if not fit.fits and fit.refusal is None and isinstance(machine, GPUMachine):
        rounded = rounded_to_fit(args, checkpoint, machine, context, options.users)
    advice = _advice(fit, args, machine.kind, context, options.users, rounded)
    if options.json:
        head = report.header(model=args.model, gpu=machine.name, context=context, users=options.users)
        print(json.dumps(head | figures | {"advice": advice}))
    else:
        _print(figures, advice, machine.name, context, options.users, runs=fit.refusal is None)
    return 0 if fit.fits else 1


def _machine_name(gpu: str | None, device: str) -> str | None:
    """What ``--gpu`` and ``--device`` mean together. Raises `ConfigError` where they contradict each other."""
    from firsttoken.devices.cuda import CUDADevice

    cpu = gpu is not None and gpu.lower() == "cpu"
    if (device == "cpu" and gpu is not None and not cpu) or (device == "cuda" and cpu):
        raise ConfigError(f"device {device!r} contradicts --gpu {gpu}: give one of them")
    if device == "cuda" and gpu is None and (refusal := CUDADevice().refusal()) is not None:
        raise ConfigError(f"device 'cuda': {refusal}; name the GPU that is planned for with --gpu")
    return "cpu" if device == "cpu" else gpu


def find_machine(name: str | None, args: EngineArgs) -> Machine:
    """The machine that ``--gpu`` means; that of this CPU is measured with an engine that has next to no model.

    Raises `ConfigError` for a name that means none.
    """
    from firsttoken.bench.footprint import measure_footprint
    from firsttoken.devices.cpu import CPUDevice, CPUFacts
    from firsttoken.devices.cuda import CUDADevice, present_gpu
    from firsttoken.engine.memory_plan import CPUMachine, GPUMachine

    if name is None and CUDADevice().refusal() is None:
        return GPUMachine(present_gpu())
    if name is not None and name.lower() != "cpu":
        return GPUMachine(_gpu(name))
    facts = CPUFacts.detect()
    chosen = CPUDevice(facts).choose_weights(args.quantization, args.dtype)
    return CPUMachine(facts, measure_footprint(chosen.dtype, chosen.quantization, facts.threads))


def _gpu(name: str) -> GPU:
    """One that is known by name, or any with so much memory."""
    from firsttoken.executor.ahead.gpus import GPU, KNOWN, known_gpu

    try:
        memory = size(name)
    except argparse.ArgumentTypeError:
        try:
            return known_gpu(name)
        except ConfigError:
            known = ", ".join(KNOWN)
            raise ConfigError(f"gpu must be cpu, a size as in 24GB, or one of {known}, got {name!r:.80}") from None
    if memory < GIB:
        number = name.strip()
        words = [known for known in KNOWN if known.endswith(f"-{number}")] + [f"{number}GB"]
        hint = "no GPU that an engine runs on has less than 1 GiB"
        if number.isdecimal():
            hint = f"write {' or '.join(words)}"
        raise ConfigError(f"gpu {name} is {memory:,} bytes: {hint}")
    like = KNOWN[_GENERATION]
    return GPU(like.name, like.capability, like.sms, memory)


def _figures(fit: Fit) -> dict[str, Any]:
    """In MiB, rounded up: parts that are rounded down could sum to more than fits."""
    plan = fit.plan
    parts = {name: getattr(plan, name) for name in ("runtime", "weights", "kv", "graphs", "activations")}
    figures: dict[str, Any] = {f"{name}_mib": math.ceil(value / MIB) for name, value in parts.items()}
    return figures | {
        "loading_mib": math.ceil(plan.loading / MIB),
        "total_mib": math.ceil(plan.total / MIB),
        "capacity_mib": fit.capacity // MIB,
        "fits": fit.fits,
        "max_users": fit.max_users,
        "max_context": fit.max_context,
        "kv_token_bytes": plan.kv_token,
        "shard_tokens": fit.shard_tokens,
    }


def _advice(fit: Fit, args: EngineArgs, kind: str, context: int, users: int, rounded: EngineArgs | None) -> list[str]:
    """What to do next: the knobs, each with the value that it would need. ``rounded`` are the options that would fit
    with everything else as it is, if there are any."""
    if fit.fits:
        memory = math.ceil(fit.plan.kv / MIB)
        device = " --device cpu" if kind == "cpu" else ""
        command = f"firsttoken serve {shlex.quote(args.model)}{device} --max-model-len {context} --max-num-seqs {users}"
        advice = [f"{command} --kv-memory {memory}MiB{_given(args)}"]
        if fit.plan.total * (1 + TOLERANCE) > fit.capacity:
            advice.append(f"it is within {TOLERANCE:.0%} of all there is, as near as a plan can be: leave some room")
        return advice
    if fit.refusal is not None:
        return [fit.refusal]
    short = math.ceil((fit.plan.total - fit.capacity) / MIB)
    advice = [f"{short} MiB are missing"]
    if fit.max_users:
        advice.append(f"lower --users to {fit.max_users}")
    if fit.max_context:
        advice.append(f"lower --context to {fit.max_context}")
    if rounded is not None:
        advice.append(f"with{_given(rounded)} all of it fits")
    if len(advice) == 1:
        advice.append("no context is short enough with so many users, and no request of that context fits alone")
        advice.append("take a smaller model, or more memory")
    return advice


def _given(args: EngineArgs) -> str:
    """What was planned with and an engine would not do by itself, as options."""
    given = []
    for name in _KEPT:
        value = getattr(args, name)
        if value != getattr(EngineArgs(model=args.model), name):
            given.append(f" --{name.replace('_', '-')}" + ("" if value is True else f" {value}"))
    return "".join(given)


def _print(figures: dict[str, Any], advice: list[str], machine: str, context: int, users: int, *, runs: bool) -> None:
    for name in ("weights", "kv", "graphs", "activations", "runtime"):
        print(f"{name:12} {figures[f'{name}_mib']:>9,} MiB")
    words = ("fits" if figures["fits"] else "does not fit") if runs else "no engine runs there"
    print(f"{'total':12} {figures['total_mib']:>9,} MiB of {figures['capacity_mib']:,} on {machine}: {words}")
    if figures["total_mib"] == figures["loading_mib"]:
        print("the peak is while loading: what is copied then is given back before the first request")
    each = f"{context:,} tokens each ({figures['kv_token_bytes']:,} bytes a token)"
    print(f"{users} at once of {each}; at most {figures['max_users']:,} at once, or {figures['max_context']:,} tokens")
    print(f"shards of {figures['shard_tokens']} tokens are recommended at this length")
    for line in advice:
        print(f"-> {line}")
