"""What one step did and when: the record that the engine makes of each, and that everything which tells where time went
is made from."""

from __future__ import annotations

import msgspec

from firsttoken.core.plan import HeldTimes

# Of a step's prompts so many are named.
MAX_NAMED_PROMPTS = 8


class StepRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step. Times are ns of the one clock (`core.clock`), in the order in which they happen: planning began, the
    plan was handed to the executor, compute began, compute ended, the loop read the result.

    ``decode_rows`` rows decoded one token each, ``prefill_tokens`` prompt tokens were computed, ``context_tokens``
    is the sum of the rows' lengths (what attention reads), ``decode_context`` of the rows that decode;
    ``prefill_pairs`` and ``prefill_reach`` of the chunks are those of `scheduler.step_time.StepLoad`.
    ``prefill_requests`` are the engine's ids of requests whose chunks were in the step, the first `MAX_NAMED_PROMPTS`
    of them. ``preempted`` requests lost their place when it was planned.

    Where the device pads, ``graph`` names the shape by its decode rows and its tokens of chunks ("d16p512"), and
    ``pad_tokens`` of it were padding. ``forward_ns`` and ``sample_ns`` are the two segments of compute; ``captured``
    says that the first was one launch of a graph, not one a kernel.

    Since the record before, the garbage collector took ``gc_ns``; the loop's thread, ready to run, waited
    ``run_queue_ns`` for a processor (0 where the kernel does not tell); and ``copied_bytes_in`` of KV were seen to have
    come from host memory and ``copied_bytes_out`` to have gone there, for which the streams beside compute took
    ``copy_ns`` together, by the device's clock.

    ``held`` are the host's times of a step with rows that are held to grammars, on a device beside which it works.
    """

    step_id: int
    planned_ns: int
    submitted_ns: int
    started_ns: int
    ended_ns: int
    harvested_ns: int
    decode_rows: int = 0
    prefill_tokens: int = 0
    context_tokens: int = 0
    gc_ns: int = 0
    run_queue_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    captured: bool = False
    prefill_requests: tuple[int, ...] = ()
    pad_tokens: int = 0
    graph: str = ""
    copied_bytes_in: int = 0
    copied_bytes_out: int = 0
    copy_ns: int = 0
    preempted: int = 0
    prefill_pairs: int = 0
    prefill_reach: int = 0
    decode_context: int = 0
    held: HeldTimes | None = None
