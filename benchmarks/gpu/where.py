"""Where the GPU's time in a step goes: the profiler's table of the kernels of captured steps.

    python -m benchmarks.gpu.where [MODEL] [--decode 1 8 64] [--prompt 512 8192] [--mixed 64:1024]
        [--quantization int4] [--output FILE]

``--mixed R:T`` is a step of R decode rows at 576 tokens and a chunk that fills it to T token rows. Times are sums over
a replay; kernels of the decode chain overlap by dependent launch, so their sum may exceed the step, which is timed by
itself.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from benchmarks.gpu.decode_step import DecodeStep, captured
from benchmarks.gpu.overlap import CONTEXT, decode_view, mixed_view
from benchmarks.gpu.prefill import prompt_view

REPLAYS = 5
# Of a kernel's name, which for cuBLAS says all of its template.
NAME_CHARS = 72


def kernels(step: DecodeStep, segment: Callable[[], object]) -> list[dict[str, Any]]:
    """What a replay runs, the longest first: launches and milliseconds of each kernel."""
    with torch.inference_mode(), step.runtime.stream():
        graph = captured(segment)
        graph.replay()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(REPLAYS):
                graph.replay()
            torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            times[event.name[:NAME_CHARS]].append(event.device_time)
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))
    return [
        {"kernel": name, "launches": len(us) / REPLAYS, "ms": round(sum(us) / REPLAYS / 1e3, 4)} for name, us in longest
    ]


def measure(step: DecodeStep, what: str, segment: Callable[[], object]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "step": what,
        "ms": round(step.replay_ms(segment, 9), 3),
        "kernels": kernels(step, segment),
    }
    print(f"{what}: {result['ms']} ms", flush=True)
    for row in result["kernels"][:8]:
        print(f"  {row['ms']:9.3f} ms {row['launches']:6.0f} x {row['kernel']}", flush=True)
    return result


def pair(text: str) -> tuple[int, int]:
    rows, total = text.split(":")
    return int(rows), int(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random:llama-3.1-8b")
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, nargs="*", default=[512, 8192])
    parser.add_argument("--mixed", type=pair, nargs="*", default=[(64, 1024)], metavar="ROWS:TOTAL")
    parser.add_argument("--quantization", choices=("none", "int4", "fp8"), default="none")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = max([*arguments.decode, *(rows for rows, _ in arguments.mixed), 1])
    longest = max([*arguments.prompt, *(total for _, total in arguments.mixed), CONTEXT])
    most = max(CONTEXT, *(total for _, total in arguments.mixed), 0)
    decoding = DecodeStep(arguments.model, rows + 1, most, arguments.quantization)
    found = []
    for count in arguments.decode:
        view = decode_view(decoding, count)
        found.append(measure(decoding, f"{count} rows at {CONTEXT}", lambda view=view: decoding.model.forward(view)))  # type: ignore[misc]
    for count, total in arguments.mixed:
        view = mixed_view(decoding, count, 0, total - count, True)
        what = f"{count} rows at {CONTEXT} and a chunk of {total - count}"
        found.append(measure(decoding, what, lambda view=view: decoding.model.forward(view)))  # type: ignore[misc]
    prompting = DecodeStep(arguments.model, 1, longest + 16, arguments.quantization)
    for tokens in arguments.prompt:
        view = prompt_view(prompting, tokens)
        found.append(measure(prompting, f"a prompt of {tokens}", lambda view=view: prompting.model.forward(view)))  # type: ignore[misc]
    document = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "model": arguments.model}
    document["quantization"] = arguments.quantization
    if arguments.output:
        arguments.output.write_text(json.dumps(document | {"steps": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
