"""The plan of one step and its result: all that the scheduler and the executor say to each other.

Both are plain msgspec structs, so a plan can be sent to another rank, written to a flight recorder and replayed.
A *slot* is the index of a request's persistent row on the device. The plan names only what changes: rows that
start, blocks that are added, slots that are given back; tokens already on the device are never sent again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import msgspec

from firsttoken.core.pooling import PoolingKind
from firsttoken.core.sampling_params import SamplingParams


class RowStart(msgspec.Struct, frozen=True, array_like=True):
    """A request takes (or, after preemption, takes again) a row.

    ``tokens`` are all its known tokens (uint32, little-endian), the first ``num_prompt`` of them the prompt;
    ``blocks`` are the KV blocks it holds at this point, in order, the leading ones possibly filled already. With
    ``pooling`` the row's only sample is a vector of its prompt, and no token. It may have ``max_tokens`` of
    output in all.
    """

    slot: int
    request_id: int
    tokens: bytes
    num_prompt: int
    params: SamplingParams
    seed: int
    blocks: list[int]
    stop_ids: tuple[int, ...] = ()
    pooling: PoolingKind | None = None
    max_tokens: int = 2**31 - 1


class RowBlocks(msgspec.Struct, frozen=True, array_like=True):
    """KV blocks appended to the row's block table before the step runs."""

    slot: int
    blocks: list[int]


class RowWork(msgspec.Struct, frozen=True, array_like=True):
    """Compute ``count`` tokens of the row from position ``start``; when ``sample``, choose the token after them.

    With ``count == 1`` and ``sample`` the row is decoding. A chunk that does not reach the end of the known tokens
    does not sample.
    """

    slot: int
    start: int
    count: int
    sample: bool


class StepPlan(msgspec.Struct, frozen=True):
    """One step. ``retire`` is applied first, then ``starts``, then ``blocks``, then ``work`` is computed.

    ``work`` holds decode rows first, then prefill chunks; slots are unique within it.
    """

    step_id: int
    work: list[RowWork]
    starts: list[RowStart] = []
    blocks: list[RowBlocks] = []
    retire: list[int] = []

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.work)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, of the raw logits: the chosen token, its rank, the most likely tokens."""

    logprob: float
    rank: int
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of all tokens of a prompt but the first, which nothing precedes.

    For each of these tokens ``values`` (float32) holds its own and those of the ``count`` most likely ones, ``ids``
    (int32) its rank and their ids, -1 where fewer were possible. Packed, since the engine's loop has no time for a
    list of thousands of objects.
    """

    count: int
    values: bytes
    ids: bytes

    def entries(self) -> Iterator[TokenLogprobs]:
        """One for each token, made as they are taken, since all of a long prompt's take megabytes. Each takes a
        microsecond or two: for a long prompt that is work for a thread."""
        values, ids = array("f", self.values), array("i", self.ids)
        width = self.count + 1
        for at in range(0, len(ids), width):
            end = at + width
            top = ids[at + 1 : end].tolist()
            if top and top[-1] < 0:
                top = top[: top.index(-1)]
            yield TokenLogprobs(values[at], ids[at], top, values[at + 1 : at + 1 + len(top)].tolist())


class RowSample(msgspec.Struct, frozen=True, array_like=True):
    """The token chosen for a row; ``error`` instead when its logits were not finite, or, then with a ``code``, when
    none was possible.

    A row with ``pooling`` has ``pooled``, its vector as float32 (little-endian), and a token that means nothing. With
    the first sample of a row that wants them come ``prompt_logprobs``.
    """

    slot: int
    token: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    pooled: bytes | None = None
    prompt_logprobs: PromptLogprobs | None = None
    code: str | None = None


class HeldTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where the host's time went in a step with rows that are held to grammars, in ns and in this order: it waited for
    their masks, handed them to the device, launched the choice of tokens, was told of those some time after the device
    had chosen them, and had the rows take them."""

    mask_ns: int
    upload_ns: int
    launch_ns: int
    hear_ns: int
    take_ns: int


class StepResult(msgspec.Struct, frozen=True):
    """What a step produced: one `RowSample` for each work item with ``sample``, in the plan's order.

    ``forward_ns`` and ``sample_ns`` are device (or compute-thread) time of the two segments; ``captured`` is True when
    the forward segment was one launch of a graph. Not ``typical`` is a step that took longer than the next one of its
    shape will, because something was done for the first time. A device that pads names the shape (``graph``) and how
    many token rows it has (``shape_tokens``). ``held`` are the host's times where rows were held.
    """

    step_id: int
    samples: list[RowSample]
    started_ns: int = 0
    ended_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    captured: bool = False
    typical: bool = True
    graph: str = ""
    shape_tokens: int = 0
    held: HeldTimes | None = None


PLAN_ENCODER = msgspec.msgpack.Encoder()
PLAN_DECODER = msgspec.msgpack.Decoder(StepPlan)
