"""What goes in and out of the scheduler at each step, and the builder of a plan."""

from __future__ import annotations

import msgspec

from firsttoken.core.plan import PromptLogprobs, RowBlocks, RowStart, RowWork, StepPlan, TokenLogprobs
from firsttoken.core.request import Request


class PlannedStep(msgspec.Struct, frozen=True):
    """A plan and the requests of its rows: ``requests[i]`` is the one of ``plan.work[i]``. ``full``: it has all the
    prompt tokens that the budget allows, so prompts may be waiting for no other reason.

    Every planned step must be submitted, in the order of planning, and its result given to `Scheduler.complete`.
    """

    plan: StepPlan
    requests: list[Request]
    full: bool = False


class Update(msgspec.Struct, frozen=True):
    """One request got a token, or ended. ``token`` is None with ``error``, and for one that generates nothing."""

    request: Request
    token: int | None
    logprobs: TokenLogprobs | None = None
    finished: bool = False
    error: str | None = None
    code: str | None = None  # of the error, where it has one
    pooled: bytes | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Counters(msgspec.Struct):
    """Running totals. ``cached_prompt_tokens`` of ``prompt_tokens`` were found in the cache at first admission;
    ``finished`` counts "stop" and "length", ``failed`` "error"."""

    preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0


class StepBuilder:
    """Collects the rows of one step, and moves each request's counts on as it does."""

    def __init__(self) -> None:
        self.starts: list[RowStart] = []
        self.blocks: list[RowBlocks] = []
        self._single: list[RowWork] = []
        self._single_requests: list[Request] = []
        self._chunks: list[RowWork] = []
        self._chunk_requests: list[Request] = []
        self.prefilled: list[Request] = []
        self.full = False

    def start(self, request: Request, blocks: list[int]) -> None:
        """The request takes its slot with all tokens known now."""
        self.starts.append(
            RowStart(
                slot=request.slot,
                request_id=request.request_id,
                tokens=request.tokens.tobytes(),
                num_prompt=request.num_prompt,
                params=request.params,
                seed=request.seed,
                blocks=blocks,
                stop_ids=tuple(sorted(request.stop_ids)),
                pooling=request.pooling,
                max_tokens=request.max_tokens,
            )
        )

    def decode(self, requests: list[Request]) -> None:
        """Compute the one wanted token of each and sample the next."""
        add = self._single.append
        for request in requests:
            computed = request.num_computed
            add(RowWork(request.slot, computed, 1, True))
            request.num_computed = computed + 1
            request.num_pending += 1
        self._single_requests += requests

    def prefill(self, request: Request, count: int) -> None:
        """Compute ``count`` of the request's wanted tokens; sample when that reaches the end of the known ones."""
        self.prefilled.append(request)
        if count == 1 and request.num_wanted == 1:
            self.decode([request])
            return
        sample = count == request.num_wanted
        request.prefill_steps += 1
        request.prefill_samples += sample
        self._chunks.append(RowWork(request.slot, request.num_computed, count, sample))
        self._chunk_requests.append(request)
        request.num_computed += count
        request.num_pending += sample

    @property
    def requests(self) -> list[Request]:
        """Of its rows, in their order."""
        return self._single_requests + self._chunk_requests

    def build(self, step_id: int, retire: list[int]) -> PlannedStep:
        """Rows with one sampled token first, as `StepPlan` promises."""
        plan = StepPlan(step_id, self._single + self._chunks, self.starts, self.blocks, retire)
        return PlannedStep(plan, self.requests, self.full)

    def __bool__(self) -> bool:
        return bool(self._single or self._chunks)
