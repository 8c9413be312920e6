"""The executor on torch: a lane is a worker thread with a queue, so submitting never waits for the model."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.core.clock import now_ns
from firsttoken.core.plan import RowSample, StepPlan, StepResult
from firsttoken.executor.config import ExecutorConfig
from firsttoken.executor.interface import MAIN_LANE
from firsttoken.executor.prompt_readers import PromptReaders, Wanted, results
from firsttoken.executor.rows import DeviceRows
from firsttoken.executor.threads import ThreadGovernor, read_cpu_times
from firsttoken.grammar.grammars import Grammars, row_of
from firsttoken.kernels.paged_attention import AttentionContext, KVPool, Segment
from firsttoken.kvcache.copy import CopyEngine
from firsttoken.kvcache.host import HostMemory
from firsttoken.kvcache.host_copy import DeferredCopyEngine
from firsttoken.kvcache.torch_copy import open_copies
from firsttoken.models.decoder import DecoderModel
from firsttoken.models.load import load_model
from firsttoken.sampling.sampler import Sampler


@dataclass(frozen=True)
class _Inputs:
    """One step's inputs on the device. ``tokens``, ``positions`` are ``[T]`` int64; ``sample_rows`` ``[R]`` int64
    indexes into them; the lists are per sampling row, in the plan's order. ``wanted`` are prompts that are read."""

    tokens: torch.Tensor
    positions: torch.Tensor
    sample_rows: torch.Tensor
    sample_slots: list[int]
    sample_positions: list[int]
    attention: AttentionContext
    wanted: list[Wanted]


class TorchExecutor:
    """One model on one device. Forward and sampling are two segments, timed apart.

    All torch work, loading included, is done by the lane's own thread: OpenMP keeps a team of threads for each thread
    that computes, and with more of them than cores it stops spinning at barriers, which made decoding twice as slow.
    """

    lanes: tuple[str, ...] = (MAIN_LANE,)

    def __init__(self, config: ExecutorConfig, make_model: Callable[[], DecoderModel]) -> None:
        self._config = config
        self._queue: queue.SimpleQueue[tuple[StepPlan, Future[StepResult]] | Callable[[], None] | None] = (
            queue.SimpleQueue()
        )
        self._broken: BaseException | None = None
        self._copies: CopyEngine | None = None
        self._grammars: Grammars | None = None
        loaded: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._work, args=(make_model, loaded), name="firsttoken-executor", daemon=True
        )
        self._thread.start()
        loaded.result()

    @classmethod
    def load(cls, config: ExecutorConfig, checkpoint: Checkpoint) -> TorchExecutor:
        """Load the weights and build the executor. Raises `CheckpointError` when a tensor is missing or misshapen."""
        return cls(
            config,
            lambda: load_model(
                checkpoint,
                device=config.device,
                dtype=config.dtype,
                quantization=config.quantization,
                threads=config.threads,
            ),
        )

    def submit(self, plan: StepPlan, lane: str = MAIN_LANE) -> Future[StepResult]:
        """Queue a step. Raises ValueError for a lane that does not exist."""
        if lane not in self.lanes:
            raise ValueError(f"unknown lane {lane!r}: this executor has {', '.join(self.lanes)}")
        future: Future[StepResult] = Future()
        self._queue.put((plan, future))
        return future

    def settle(self) -> None:
        """The lane's thread does all of a step."""

    def idle(self) -> bool:
        """Nothing is done ahead."""
        return False

    @property
    def unprepared(self) -> int:
        return 0

    def copies(self, host: HostMemory | None = None, *, may_grow: Callable[[], bool] = lambda: True) -> CopyEngine:
        """They are done by the lane's thread, between the steps before and after them."""
        if self._copies is not None:
            raise RuntimeError("this executor's copies were asked for already")
        self._copies = DeferredCopyEngine(open_copies(self._pool.storage, host, may_grow=may_grow), self._queue.put)
        return self._copies

    def hold_to(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()
        self._queue.put(None)
        self._thread.join()

    # ------------------------------------------------------------------ the lane's thread

    def _work(self, make_model: Callable[[], DecoderModel], loaded: Future[None]) -> None:
        with torch.inference_mode():
            try:
                torch.set_num_threads(self._config.threads)
                self._load(make_model())
            except BaseException as error:
                loaded.set_exception(error)
                return
            loaded.set_result(None)
            governor = self._governor()
            threads = self._config.threads
            while (item := self._queue.get()) is not None:
                if callable(item):
                    item()
                    continue
                plan, future = item
                if self._broken is not None:
                    # Rows and KV no longer match the plans: nothing after a failed step may run.
                    future.set_exception(RuntimeError(f"an earlier step failed: {self._broken!r}"))
                    continue
                if governor is not None and (wanted := governor.choose()) != threads:
                    torch.set_num_threads(threads := wanted)
                self._serve(plan, future)

    def _serve(self, plan: StepPlan, future: Future[StepResult]) -> None:
        """Run a step, hand its result over, and do what may be done for the next one while the loop plans it."""
        try:
            future.set_result(self._run(plan))
            self._sampler.prepare()
        except BaseException as error:
            self._broken = error
            if not future.done():
                future.set_exception(error)

    def _governor(self) -> ThreadGovernor | None:
        if not self._config.adaptive_threads or not hasattr(os, "sched_getaffinity"):
            return None
        return ThreadGovernor(self._config.threads, frozenset(os.sched_getaffinity(0)), read_cpu_times)

    def _load(self, model: DecoderModel) -> None:
        config = self._config
        self._model = model
        self._pool = KVPool(config.kv_format, config.kv_blocks, device=config.device)
        self._rows = DeviceRows(config.max_num_seqs, config.max_model_len, config.kv_format.block_tokens, config.device)
        self._prompts = PromptReaders(config.device, model.logits)
        self._sampler = Sampler(model.config.vocab_size, config.max_num_seqs, config.device)

    def _run(self, plan: StepPlan) -> StepResult:
        """Apply the plan's changes and compute its work."""
        started = now_ns()
        self._apply(plan)
        inputs = self._gather(plan)
        hidden, prompts = self._forward(inputs)
        forward_done = now_ns()
        samples = self._sample(hidden, inputs) if inputs.sample_slots else []
        if inputs.wanted:
            reads = self._prompts.read(inputs.wanted, prompts)
            samples = results(reads, _in_order(plan, samples))
        ended = now_ns()
        return StepResult(
            step_id=plan.step_id,
            samples=samples,
            started_ns=started,
            ended_ns=ended,
            forward_ns=forward_done - started,
            sample_ns=ended - forward_done,
        )

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.retire:
            self._sampler.retire(slot)
            self._prompts.retire(slot)
        for row in plan.starts:
            self._rows.start(row)
            self._prompts.start(row)
            known = np.frombuffer(row.tokens, dtype="<u4").astype(np.int64)
            self._sampler.start(
                row.slot,
                row.params,
                row.seed,
                torch.from_numpy(known),
                row.num_prompt,
                row.stop_ids,
                row_of(self._grammars, row),
            )
        for added in plan.blocks:
            self._rows.add_blocks(added)

    def _gather(self, plan: StepPlan) -> _Inputs:
        device = self._config.device
        counts = np.array([work.count for work in plan.work], dtype=np.int64)
        starts = np.array([work.start for work in plan.work], dtype=np.int64)
        slots = np.array([work.slot for work in plan.work], dtype=np.int64)
        ends = np.cumsum(counts)
        # Position of each token row: its offset within its own work item, plus where that item starts.
        positions = np.arange(ends[-1], dtype=np.int64) + np.repeat(starts - (ends - counts), counts)
        # Asked before the readers of prompts that end here are given up.
        sampling = [i for i, work in enumerate(plan.work) if work.sample and not self._prompts.pools(work.slot)]
        positions_device = torch.from_numpy(positions).to(device)
        tables = self._rows.block_tables
        block_tokens = self._config.kv_format.block_tokens
        segments = [
            Segment(tables[work.slot, : -(-(work.start + work.count) // block_tokens)], work.start, work.count)
            for work in plan.work
        ]
        return _Inputs(
            tokens=self._rows.gather(torch.from_numpy(np.repeat(slots, counts)).to(device), positions_device),
            positions=positions_device,
            sample_rows=torch.from_numpy(ends[sampling] - 1).to(device),
            sample_slots=[plan.work[i].slot for i in sampling],
            sample_positions=[plan.work[i].start + plan.work[i].count for i in sampling],
            attention=AttentionContext.build(self._pool, segments),
            wanted=self._prompts.wanted(plan.work, (ends - counts).tolist),
        )

    def _forward(self, inputs: _Inputs) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Hidden states of the rows that sample, and of each prompt that is read."""
        model, sampled = self._model, inputs.sample_rows
        if not inputs.wanted:
            return model.forward(inputs.tokens, inputs.positions, inputs.attention, sampled), []
        parts = [torch.arange(one.first, one.end, device=sampled.device) for one in inputs.wanted]
        rows: torch.Tensor = torch.unique(torch.cat([sampled, *parts]))  # sorted
        hidden = model.forward(inputs.tokens, inputs.positions, inputs.attention, rows)
        return hidden[torch.searchsorted(rows, sampled)], [hidden[torch.searchsorted(rows, part)] for part in parts]

    def _sample(self, hidden: torch.Tensor, inputs: _Inputs) -> list[RowSample]:
        logits = self._model.logits(hidden)
        batch = self._sampler.sample(logits, inputs.sample_slots, inputs.sample_positions)
        self._rows.append(inputs.sample_slots, inputs.sample_positions, batch.tokens)
        return [
            RowSample(slot, token, logprobs, error, code=code)
            for slot, token, logprobs, error, code in zip(
                inputs.sample_slots, batch.tokens.tolist(), batch.logprobs, batch.errors, batch.codes, strict=True
            )
        ]


def _in_order(plan: StepPlan, samples: list[RowSample]) -> list[RowSample]:
    """The plan's samples, with a place for each row of which a vector is wanted and no token was chosen."""
    chosen = {sample.slot: sample for sample in samples}
    return [chosen.get(work.slot) or RowSample(work.slot, 0) for work in plan.work if work.sample]
