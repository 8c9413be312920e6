"""The messages between front end and engine, as msgspec structs (msgpack on the wire, never pickle)."""

from __future__ import annotations

from typing import Literal

import msgspec

from firsttoken.core.agreement import SelfCheck
from firsttoken.core.cache_miss import Miss
from firsttoken.core.plan import PromptLogprobs, TokenLogprobs
from firsttoken.core.request import EngineRequest
from firsttoken.core.retention import NotKept
from firsttoken.core.step_record import StepRecord
from firsttoken.transport.kv_report import KVReport

# ---------------------------------------------------------------- to the engine


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Add requests; they arrive together, so that they may start in the same step."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End these requests at once. Unknown or finished ids are ignored: an abort may cross a finish."""

    ids: list[int]


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave the loop; whatever still runs is dropped."""


ToEngine = Submit | Abort | Shutdown

# -------------------------------------------------------------- from the engine


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front end must know of a started engine. Sizes in tokens, blocks and bytes as named."""

    model: str
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    kv_blocks: int
    block_tokens: int
    bytes_per_block: int
    device: str
    dtype: str
    quantization: str
    kv_dtype: str
    hidden_size: int = 0  # numbers of a vector
    device_name: str = ""  # as its vendor calls it
    start_ms: dict[str, float] = {}
    kv_outlives: bool = False  # what callers send may be found after a restart
    self_check: SelfCheck | None = None  # None where the model has no reference


class ClassStats(msgspec.Struct, frozen=True, array_like=True):
    """One service class: requests that wait and that run, how many were turned away for each reason of
    `scheduler.admission.Reason`, and `scheduler.headroom.Outlook`'s predictions in seconds."""

    waiting: int
    running: int
    refused: dict[str, int]
    predicted_ttft_s: float
    until_missed_s: float | None


class StepTimeErrors(msgspec.Struct, frozen=True, array_like=True):
    """How far the model of step times was off in the last ``steps`` steps of a kind, as |predicted - measured| /
    measured: the ``median`` and the ``p90``."""

    steps: int
    median: float
    p90: float


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and running totals, sent with every step and as a heartbeat when idle. ``kv_*`` count blocks.

    ``heartbeat_ns`` is when the loop last turned, ``last_step_ns`` when a step last ended: with work to do and an
    old ``last_step_ns`` the engine is stuck, with a fresh one it is busy. ``captured_steps`` of all ``steps`` so far
    were launched as a graph. ``host_ns`` is the CPU time that the loop's thread took to plan, submit, complete and tell
    them (not to wait for them); ``peak_memory`` the most bytes of the device (for a CPU: of the process) ever held, as
    of the last heartbeat of an idle engine, 0 if unknown. ``unprepared`` kinds of steps will be captured when
    the engine is idle; until then they take longer.
    """

    steps: int = 0
    captured_steps: int = 0
    unprepared: int = 0
    running: int = 0
    waiting: int = 0
    kv_total: int = 0
    kv_used: int = 0
    kv_cached: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    heartbeat_ns: int = 0
    last_step_ns: int = 0
    host_ns: int = 0
    peak_memory: int = 0
    classes: list[ClassStats] = []  # in the order of `ServiceClass`
    step_time_errors: dict[str, StepTimeErrors] = {}  # of each kind of step that was seen: decode, mixed, prefill


class Spent(msgspec.Struct, frozen=True, array_like=True):
    """What a request has spent in the engine so far: ns in the queue for each `core.waits.Wait`, and the steps in which
    its prompt was computed (what was known after a preemption, too) and in which it decoded."""

    queue_ns: list[int]
    prefill_steps: int
    decode_steps: int


class RequestDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one request. With ``finish_reason`` it is the last one, and carries the engine's part of the
    timeline and counts.

    ``finish_reason``: "stop" (an end token), "length", "abort" or "error" (then ``error`` says why, and ``code``, where
    there is one, is a stable word for it).
    ``stop_reason``: the token id that ended it, when it was one of the caller's ``stop_token_ids``.
    ``cached_tokens`` of the prompt were found, ``cached_host`` and ``cached_disk`` of them in lower tiers than the
    device; ``miss`` says why no more were. ``kept``: whether the request's wish for retention was granted, None without
    one, and ``kept_reason`` why not. ``spent`` comes with its first tokens and with the last. ``prompt_logprobs`` come
    with the first tokens, or with the end of a request that generates none; ``pooled`` is the vector of one that was to
    be pooled, float32. Whatever is told once comes with ``stamps``, so that a delta without any has nothing but tokens.
    """

    id: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    code: str | None = None
    cached_tokens: int = 0
    stamps: list[tuple[int, int]] = []
    preemptions: int = 0
    cached_host: int = 0
    cached_disk: int = 0
    miss: Miss | None = None
    kept: bool | None = None
    kept_reason: NotKept | None = None
    spent: Spent | None = None
    prompt_logprobs: PromptLogprobs | None = None
    pooled: bytes | None = None


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Sent once, when the engine can take requests."""

    info: EngineInfo


class StepOutputs(msgspec.Struct, frozen=True, tag="step"):
    """Everything one turn of the loop has to say: one message, whatever the number of requests. ``kv`` is there when it
    has changed, a few times a second. ``steps`` are the records since the last that were told, the oldest first: all of
    them when a request has ended, else ten times a second, and before `Failed`."""

    deltas: list[RequestDelta]
    stats: EngineStats
    kv: KVReport | None = None
    steps: list[StepRecord] = []


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A request that is not run; the reason with its numbers. With ``retry_after_s`` it was turned away for want of
    capacity and may come again in so many seconds, without it can never run."""

    id: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


FailureKind = Literal["config", "checkpoint", "engine"]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot go on (or could not start); no message follows.

    ``kind``: an option could not be honoured, the model's files are at fault, or the engine itself.
    """

    message: str
    kind: FailureKind = "engine"


FromEngine = Ready | StepOutputs | Refused | Failed

ENCODER = msgspec.msgpack.Encoder()
TO_ENGINE = msgspec.msgpack.Decoder(ToEngine)
FROM_ENGINE = msgspec.msgpack.Decoder(FromEngine)
