"""Ways to compute a prompt beside decode rows, on one GPU: what each does to the first token and to the gaps.

    python -m benchmarks.gpu.overlap [MODEL] [--rows 64] [--prompt 2048] [--output overlap.json]

``streams``: the prompt's graph on a second stream. ``priority``: the same, decode on a stream of high priority.
``partition``: each on its own multiprocessors, as two green contexts. ``mixed``: chunks of the prompt in the decode
steps themselves, as the engine does it. Each is timed with decode steps
that follow one another while the prompt is computed: ``prompt_ms`` until its first token, ``gap_ms`` the mean and
longest decode step meanwhile.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.decode_step import DecodeStep, captured
from benchmarks.gpu.prefill import prompt_view
from firsttoken.kernels.paged_attention.gpu_config import make_tiles
from firsttoken.models.step_view import StepView

Stream = torch.cuda.Stream
CONTEXT = 576  # tokens of each decode row
_RESOURCE_BYTES = 144  # CUdevResource, which is opaque to us
_SM_RESOURCE, _DEFAULT_STREAM, _NON_BLOCKING = 1, 1, 1


@dataclass(frozen=True)
class Work:
    """A captured step on its stream."""

    graph: torch.cuda.CUDAGraph
    stream: Stream

    def launch(self) -> None:
        with torch.cuda.stream(self.stream):
            self.graph.replay()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event


def capture(segment: Callable[[], object], stream: Stream) -> Work:
    with torch.inference_mode(), torch.cuda.stream(stream):
        return Work(captured(segment), stream)


def partition(sms: int) -> tuple[Stream, Stream]:
    """Streams of two green contexts: one of about ``sms`` multiprocessors, and one of all the others."""
    torch.cuda.current_stream().synchronize()
    driver = ctypes.CDLL("libcuda.so.1")
    whole, one, other = (ctypes.create_string_buffer(_RESOURCE_BYTES) for _ in range(3))
    device, groups = ctypes.c_int(torch.cuda.current_device()), ctypes.c_uint(1)

    def check(what: str, code: int) -> None:
        if code:
            raise RuntimeError(f"{what} failed with CUDA error {code}")

    def stream_of(resource: Any) -> Stream:
        description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        check("a resource's description", driver.cuDevResourceGenerateDesc(ctypes.byref(description), resource, 1))
        flags = ctypes.c_uint(_DEFAULT_STREAM)
        check("a green context", driver.cuGreenCtxCreate(ctypes.byref(context), description, device, flags))
        made = driver.cuGreenCtxStreamCreate(ctypes.byref(stream), context, ctypes.c_uint(_NON_BLOCKING), 0)
        check("its stream", made)
        return torch.cuda.ExternalStream(stream.value)  # type: ignore[no-untyped-call]

    check("the device's resource", driver.cuDeviceGetDevResource(device, whole, ctypes.c_int(_SM_RESOURCE)))
    split = driver.cuDevSmResourceSplitByCount(
        one, ctypes.byref(groups), whole, other, ctypes.c_uint(0), ctypes.c_uint(sms)
    )
    check("a partition", split)
    return stream_of(one), stream_of(other)


def alone_ms(work: Work, replays: int = 7) -> float:
    times = []
    for _ in range(replays):
        begin = work.mark()
        work.launch()
        end = work.mark()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(statistics.median(times))


def together(prompt: Work, decode: Work, steps: int) -> tuple[float, list[float]]:
    """Milliseconds of the prompt, and of the decode steps that ended before it."""
    torch.cuda.synchronize()
    begin = prompt.mark()
    prompt.launch()
    end = prompt.mark()
    marks = [decode.mark()]
    for _ in range(steps):
        decode.launch()
        marks.append(decode.mark())
    torch.cuda.synchronize()
    prompt_ms = begin.elapsed_time(end)
    inside = [mark for mark in marks if begin.elapsed_time(mark) <= prompt_ms]
    return prompt_ms, [a.elapsed_time(b) for a, b in pairwise(inside)]


def decode_view(step: DecodeStep, rows: int) -> StepView:
    """Rows in the middle of their answers."""
    return replace(step.view(rows), positions=step.ints(torch.full((rows,), CONTEXT - 1)))


def mixed_view(step: DecodeStep, rows: int, start: int, count: int, last: bool) -> StepView:
    """Decode rows and one chunk of a further request's prompt, which samples if it is the ``last``."""
    ints, plain = step.ints, replace(decode_view(step, rows), pdl=False)
    one = np.ones(1, np.int32)
    tiles = make_tiles(one * start, one * count, one * rows, one * rows, step.model.tile_rows)
    sampled = [*range(rows), *([rows + count - 1] if last else [])]
    return replace(
        plain,
        slots=torch.cat([plain.slots, ints(torch.full((count,), rows))]),
        positions=torch.cat([plain.positions, ints(torch.arange(start, start + count))]),
        tiles=ints(torch.from_numpy(tiles)),
        sample_rows=ints(torch.tensor(sampled)),
        identity=False,
    )


def mixed(step: DecodeStep, rows: int, prompt: int, total: int) -> dict[str, Any]:
    """Chunks in the decode steps, each of ``total`` token rows."""
    times = []
    for start in range(0, prompt, total - rows):
        count = min(total - rows, prompt - start)
        view = mixed_view(step, rows, start, count, start + count == prompt)
        times.append(step.replay_ms(lambda view=view: step.model.forward(view), 7))  # type: ignore[misc]
    return result(f"mixed, {total} token rows", sum(times), times)


def result(way: str, prompt_ms: float, gaps: list[float]) -> dict[str, Any]:
    found = {"way": way, "prompt_ms": round(prompt_ms, 2), "decode_steps": len(gaps)}
    if gaps:
        found |= {"gap_ms": round(statistics.mean(gaps), 2), "longest_gap_ms": round(max(gaps), 2)}
    print(found, flush=True)
    return found


def measure(model: str, rows: int, prompt: int) -> list[dict[str, Any]]:
    # A copy of the model each: their work spaces must not meet.
    decoding, prompting = DecodeStep(model, rows + 1, prompt), DecodeStep(model, 1, prompt)
    view, long = decode_view(decoding, rows), prompt_view(prompting, prompt)

    def both(prompt_stream: Stream, decode_stream: Stream) -> tuple[Work, Work]:
        return (
            capture(lambda: prompting.model.forward(long), prompt_stream),
            capture(lambda: decoding.model.forward(view), decode_stream),
        )

    def overlapped(way: str, works: tuple[Work, Work]) -> dict[str, Any]:
        runs = sorted((together(*works, 60) for _ in range(5)), key=lambda run: run[0])
        return result(way, *runs[2])

    plain = both(Stream(), Stream())  # type: ignore[no-untyped-call]
    found = [
        result("one after the other: the prompt alone", alone_ms(plain[0]), []),
        result("one after the other: decode alone", 0.0, [alone_ms(plain[1])]),
        overlapped("two streams", plain),
        overlapped("two streams, decode first", both(Stream(), Stream(priority=-1))),  # type: ignore[no-untyped-call]
    ]
    for sms in (32, 64):
        few, many = partition(sms)
        works = both(many, few)
        alone = {"prompt_alone_ms": alone_ms(works[0]), "decode_alone_ms": alone_ms(works[1])}
        found.append(overlapped(f"partition, decode on {sms} multiprocessors", works) | alone)
        print(alone, flush=True)
    return found + [mixed(decoding, rows, prompt, total) for total in (512, 1024)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random:llama-3.1-8b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.model, arguments.rows, arguments.prompt)
    document = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "model": arguments.model}
    document |= {"rows": arguments.rows, "prompt": arguments.prompt}
    if arguments.output:
        arguments.output.write_text(json.dumps(document | {"ways": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
