"""A request inside the engine, from the door to its last token."""

from __future__ import annotations

from array import array
from enum import Enum

import msgspec

from firsttoken.core.cache_miss import Miss
from firsttoken.core.pooling import PoolingKind
from firsttoken.core.retention import NotKept, Retention
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import ServiceClass
from firsttoken.core.timeline import Mark, Timeline
from firsttoken.core.waits import Wait


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What travels to the engine. ``id`` is chosen by the front end and unique in the engine's life.

    ``prompt`` holds the token ids as little-endian uint32. ``seed`` is always set (drawn by the front end when the
    caller gave none), so that preemption and replay repeat the same tokens. ``stop_ids`` are all ids that end the
    text: the model's end tokens (unless ``ignore_eos``) and the caller's ``stop_token_ids``. ``service`` is a
    `ServiceClass`, ``priority`` orders inside it (lower first), and ``tenant`` names who shares the class with others,
    in proportion to ``share``. A request that has not started by ``deadline_ns`` never does; 0 for none. ``retention``
    is the caller's wish for its KV. With ``max_tokens`` 0 it generates nothing: it ends when its prompt is computed,
    for what is wanted of that, a vector by ``pooling`` or the prompt's log-probabilities.
    """

    id: int
    prompt: bytes
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    salt: str = ""
    priority: int = 0
    service: int = ServiceClass.P2
    tenant: str = ""
    share: float = 1.0
    deadline_ns: int = 0
    retention: Retention | None = None
    pooling: PoolingKind | None = None
    stamps: list[tuple[int, int]] = msgspec.field(default_factory=list)


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """Mutable state of one request; owned by the scheduler, read by the engine.

    Invariant: ``0 <= num_computed <= num_tokens + num_pending``. ``num_computed`` counts tokens whose KV has been
    *planned* (a submitted step is as good as done: steps of one lane run in order). ``num_pending`` counts samples
    that are in flight, whose tokens only the device knows yet.

    ``miss`` says why no more than ``num_cached`` tokens were cached, None when no more could be. Its ``retention``
    begins when it ends: ``kept`` says whether there was room for that, None without such a wish, and ``kept_reason``
    why there was not. ``queue_ns``: how long it waited for each `Wait`, as far as it has ceased to.
    ``prefill_steps`` steps had a chunk of it, and ``prefill_samples`` of those chose a token.

    One that generates nothing (``prompt_only``) is to the scheduler a request of one token, which is never harvested.

    ``held`` is what shall live as long as it does.

    It began to queue at ``arrived_ns``, by default now, but not before its last stamp.
    """

    __slots__ = (
        "deadline_ns",
        "finish_reason",
        "first_scheduled",
        "held",
        "kept",
        "kept_reason",
        "max_tokens",
        "miss",
        "num_cached",
        "num_cached_disk",
        "num_cached_host",
        "num_computed",
        "num_front_stamps",
        "num_pending",
        "num_prompt",
        "params",
        "pooling",
        "preemptions",
        "prefill_samples",
        "prefill_steps",
        "priority",
        "prompt_only",
        "queue_ns",
        "request_id",
        "retention",
        "salt",
        "seed",
        "service",
        "share",
        "slot",
        "status",
        "stop_ids",
        "stop_reason",
        "tenant",
        "timeline",
        "tokens",
        "wants_all_positions",
    )

    def __init__(self, wire: EngineRequest, *, arrived_ns: int | None = None) -> None:
        self.request_id = wire.id
        self.params = wire.params
        self.seed = wire.seed
        self.prompt_only = wire.max_tokens == 0
        self.max_tokens = 1 if self.prompt_only else wire.max_tokens
        self.pooling = wire.pooling
        self.wants_all_positions = wire.pooling == "mean" or wire.params.prompt_logprobs is not None
        self.stop_ids = frozenset(wire.stop_ids)
        self.salt = wire.salt
        self.priority = wire.priority
        self.service = wire.service
        self.tenant = wire.tenant
        self.share = wire.share
        self.deadline_ns = wire.deadline_ns
        self.retention = wire.retention
        self.tokens: array[int] = array("I", wire.prompt)
        self.num_prompt = len(self.tokens)
        self.num_computed = 0
        self.num_pending = 0
        self.num_cached = 0  # prompt tokens that were found in any tier, of which
        self.num_cached_host = self.num_cached_disk = 0
        self.num_front_stamps = len(wire.stamps)
        self.preemptions = 0
        self.prefill_steps = self.prefill_samples = 0
        self.queue_ns = [0] * len(Wait)
        self.first_scheduled = False
        self.held: object = None
        self.slot = -1
        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | None = None
        self.miss: Miss | None = None
        self.kept: bool | None = None
        self.kept_reason: NotKept | None = None
        self.timeline = Timeline(list(wire.stamps))
        self.timeline.stamp(Mark.ARRIVED, arrived_ns)

    @property
    def kv_class(self) -> int:
        """The class by which eviction scores what it uses."""
        wish = self.retention
        return self.service if wish is None or wish.service is None else wish.service

    @property
    def needs_all_positions(self) -> bool:
        """Something of every position of its prompt is still wanted, so none can come from the cache."""
        return self.wants_all_positions and not self.num_output

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and harvested output."""
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_wanted(self) -> int:
        """Tokens that could be computed now: the one number the scheduling rule works on."""
        return len(self.tokens) + self.num_pending - self.num_computed

    @property
    def all_planned(self) -> bool:
        """True when every token it may generate has been sampled or is being sampled."""
        return self.num_output + self.num_pending >= self.max_tokens

    def finish(self, reason: str, stop_reason: int | None = None) -> None:
        self.status = Status.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.timeline.stamp(Mark.FINISHED)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.value}, prompt={self.num_prompt}, output={self.num_output}, "
            f"computed={self.num_computed}, pending={self.num_pending}, slot={self.slot})"
        )
