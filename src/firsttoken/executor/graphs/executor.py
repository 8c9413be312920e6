"""The step on a device with graphs: pack the inputs, launch, and read the result when it is there.

The host never waits in `submit`: it writes a step's inputs to pinned memory and launches one graph, and may submit the
next step before it reads this one. Steps run in the order of one stream. Shapes whose graph is not captured yet run
kernel by kernel; graphs are captured when the engine is idle, the smallest first, once other processes have compiled
their kernels.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from firsttoken.core.clock import now_ns
from firsttoken.core.plan import RowStart, StepPlan, StepResult
from firsttoken.executor.ahead.plan import GREEDY, RANDOM, RICH, Key, class_of
from firsttoken.executor.ahead.readiness import Readiness
from firsttoken.executor.config import ExecutorConfig
from firsttoken.executor.graphs.captures import Captures, Graph, first_captures
from firsttoken.executor.graphs.choice import Chooser, Launched
from firsttoken.executor.graphs.device_clock import DeviceClock
from firsttoken.executor.graphs.held import HeldRows, Holds
from firsttoken.executor.graphs.in_flight import Place, StepInFlight
from firsttoken.executor.graphs.inputs import StepInputs, StepLayout, first_rows
from firsttoken.executor.graphs.profiles import SMALL_ROWS, ShapeTable, StepShape
from firsttoken.executor.graphs.results import ResultRing
from firsttoken.executor.graphs.rows import STAGING_WORDS, Staging, StreamRows
from firsttoken.executor.graphs.runtime import Runtime
from firsttoken.executor.interface import MAIN_LANE
from firsttoken.executor.prompt_readers import PromptReaders, Read, Wanted, results, to_device
from firsttoken.grammar.grammars import Grammars
from firsttoken.kernels.step_io import new_state
from firsttoken.kvcache.copy import CopyEngine
from firsttoken.kvcache.host import HostMemory
from firsttoken.kvcache.torch_copy import open_copies
from firsttoken.models.step_view import Kept, Logits, StepModel, StepView
from firsttoken.sampling.device.params import Needs
from firsttoken.sampling.device.sampler import DeviceSampler

# Places in the ring of inputs and results: with more steps in flight `submit` would wait for the oldest.
RING = 8
# Kernels of a step that were not compiled ahead take seconds: without word of them only a long pause is used.
LONG_PAUSE_NS = 2 * 10**9
# Who has just got an answer may come again at once, and would wait for a capture.
SHORT_PAUSE_NS = 2 * 10**8

log = logging.getLogger(__name__)

T = TypeVar("T")


class GraphExecutor:
    """One model on one device. All calls come from the engine's thread, those of its `copies` too. ``kernels`` tells
    which are compiled already, ``kv`` is the pool ``[num_blocks, ...]`` that ``model`` keeps its KV in.

    A captured step's sampling can either only choose the likeliest tokens, or honour any parameters but edits and
    log-probabilities. Steps that need more have a graph of the model alone.
    """

    lanes: tuple[str, ...] = (MAIN_LANE,)

    def __init__(
        self,
        config: ExecutorConfig,
        model: StepModel,
        runtime: Runtime,
        kernels: Readiness | None = None,
        kv: torch.Tensor | None = None,
    ) -> None:
        self._config = config
        self._kernels = kernels or Readiness()
        self._model = model
        self._kv = kv
        self._copies: CopyEngine | None = None
        self._holds = Holds()
        self._runtime = runtime
        self.table = ShapeTable(config.max_num_seqs, config.max_step_tokens, model.tile_rows)
        slots, largest = config.max_num_seqs, self.table.largest()
        self._decode_shapes = [self.table.shape(rows, [], 0) for rows in range(slots + 1)]
        ring = runtime.pinned(RING * StepLayout(largest).words).view(RING, -1)
        with self._working():  # what is zeroed must be so in the order of the steps' stream
            self._state = new_state(runtime.device)
            self._inputs = StepInputs(self.table, ring, runtime.device)
            self._prompts = PromptReaders(runtime.device, model.logits)
            self._sampler = DeviceSampler(model.vocab_size, slots, largest.samples, runtime.device)
            self._rows = StreamRows(config.max_model_len, config.kv_format.block_tokens, self._sampler.words)
            self._results = ResultRing(largest.samples, RING, self._state, runtime)
            self._chooser = Chooser(self._sampler, self._results, runtime, self._working)
        self._places = [Place(Staging(runtime.pinned(STAGING_WORDS)), runtime.event()) for _ in range(RING)]
        self._flying: list[StepInFlight | None] = [None] * RING
        self._next = 0
        self._captures = Captures(first_captures(self.table, deterministic=config.deterministic))
        self._closed = False
        self._rehearsed: Key | None = None
        self._launched: set[Key] = set()
        self._slowest_ns = 0
        self._busy_ns = now_ns()
        self._clock = DeviceClock()

    # ------------------------------------------------------------------ steps

    def submit(self, plan: StepPlan, lane: str = MAIN_LANE) -> StepInFlight:
        """Start a step. Raises ValueError for a lane that does not exist."""
        if lane not in self.lanes:
            raise ValueError(f"unknown lane {lane!r}: this executor has {', '.join(self.lanes)}")
        self._busy_ns = now_ns()
        self._runtime.enter()
        index = self._take_place()
        place = self._places[index]
        sampled = [row.slot for row in plan.work if row.sample]
        patches = self._apply(plan, place.staging)
        shape = self._shape(plan)
        if patches and len(patches) > self._inputs.layout(shape).num_patches:
            with self._working():
                self._rows.append(patches, place.staging)
            patches = []
        self._inputs.pack(plan, shape, patches, index)
        needs = self._sampler.needs(sampled)
        wanted = self._prompts.wanted(plan.work, lambda: first_rows(plan.work, shape))
        held = self._holds.of(sampled)
        reads: list[Read] = []
        captured, apart = False, None
        try:
            if wanted:
                reads, apart = self._run_reading(shape, needs, wanted, apart=held is not None)
            else:
                captured, apart = self._run(shape, needs, apart=held is not None)
            if apart is None:
                self._pass(index)
        finally:
            if apart is None:
                place.end.record()
        logprobs = self._sampler.num_logprobs(sampled)
        flying = StepInFlight(
            place,
            lambda: self._read(plan.step_id, index, shape, sampled, logprobs, captured, reads, held),
            held,
            None if apart is None or held is None else partial(self._choose_held, index, held, apart),
        )
        self._flying[index] = flying
        return flying

    def settle(self) -> None:
        flying = self._flying[self._next]  # the newest, where the turn has not passed on; else one of long ago
        if flying is not None:
            flying.launch_rest()

    def hold_to(self, grammars: Grammars) -> None:
        self._holds.grammars = grammars

    def close(self) -> None:
        """Wait for what was submitted, and give the device's memory back: another engine may follow in the process."""
        if self._closed:
            return
        self._closed = True
        if self._copies is not None:
            self._copies.close()
        self._kv = None
        self._kernels.close()
        self._runtime.synchronize()
        for flying in self._flying:
            if flying is not None:
                flying.result()  # kept by the step itself, for who reads it later
        # Flying steps hold the executor itself, and graphs the memory that they were captured with.
        self._flying.clear()
        self._captures = Captures([])
        del self._model, self._prompts, self._sampler, self._rows
        del self._inputs, self._results, self._chooser, self._state
        self._runtime.release()

    def copies(self, host: HostMemory | None = None, *, may_grow: Callable[[], bool] = lambda: True) -> CopyEngine:
        """On streams of their own. Raises `RuntimeError` for an executor without KV, too."""
        if self._kv is None or self._copies is not None:
            raise RuntimeError("this executor has no KV to copy, or its copies were asked for already")
        self._runtime.enter()  # the steps' stream is then the one that copies wait for, in this thread
        self._copies = open_copies(self._kv, host, may_grow=may_grow)
        return self._copies

    def idle(self) -> bool:
        """Do half of what one more graph needs: first its kernels are loaded, then it is captured. True when there is
        more that could be done at once."""
        if now_ns() - self._busy_ns < SHORT_PAUSE_NS:
            return False
        key = self._next_capture()
        if key is None:
            return False
        began = now_ns()
        if self._rehearsed != key:
            if self._attempt(key, lambda: self._run_padded(key)):
                self._rehearsed = key
        else:
            self._attempt(key, lambda: self.capture(*key))
        took = now_ns() - began
        self._slowest_ns = max(self._slowest_ns, took)
        log.debug("%s %s: %.1f ms", "captured" if key in self._captures else "loaded", key, took / 1e6)
        if not self._captures.left:
            self._tell_captured()
        return self._next_capture() is not None

    @property
    def unprepared(self) -> int:
        return self._captures.left

    def capture(self, shape: StepShape, needs: Needs | None) -> None:
        """Make the graph of a shape, so that its steps are one launch; without ``needs`` that of the model alone.
        Nothing happens when there is one."""
        key = shape, needs
        if key in self._captures:
            return
        if self._rehearsed != key:
            self._run_padded(key)
        self._rehearsed = None
        self._captures.add(key, self._captured(key))

    def _captured(self, key: Key) -> Graph:
        """A graph of what the key's steps launch; all of it must have been launched before."""
        shape, needs = key
        logits: Logits | None = None

        def segment() -> None:
            nonlocal logits
            logits = self._segment(shape, needs or GREEDY, apart=needs is None).logits

        with self._working():
            replay = self._runtime.capture(segment)
        # Only those of the model alone are asked for: the others would keep memory that their graph could use again.
        return Graph(replay, self._view(shape), (lambda: logits) if needs is None else (lambda: None))

    def rehearse(self, key: Key) -> None:
        """Launch everything that steps of this key may launch, on rows that are all padding."""
        shape, needs = key
        with self._working():
            if needs is None:
                self._sampler.make_room()
            self._rows.start_padding(self._places[self._take_place()].staging)
        self._run_padded((shape, RICH if needs is None else needs))

    # ------------------------------------------------------------------ inside

    def _attempt(self, key: Key, work: Callable[[], None]) -> bool:
        """Whether ``work`` towards the graph of ``key`` came to its end. Steps do without a graph, so all that may fail
        here is the device itself."""
        try:
            try:
                work()
                return True
            except torch.OutOfMemoryError:
                pass
            # A capture cannot take what earlier steps left in the allocator's cache.
            self._runtime.release()
            work()
            return True
        except torch.OutOfMemoryError:
            log.warning("no memory is left for more than %d captured steps: others run by kernels", len(self._captures))
            self._captures.stop()
        except Exception:
            self._runtime.synchronize()  # raises if the device has failed
            log.exception("%s is not captured, its steps run by kernels", key)
            self._captures.refuse(key)
        return False

    def _with_memory(self, work: Callable[[], T]) -> T:
        """``work``, which may be done twice; when memory does not suffice, at the cost of all graphs."""
        try:
            return work()
        except torch.OutOfMemoryError:
            if not len(self._captures):
                raise
        log.warning("no memory is left for a step: %d captured ones are given up", len(self._captures))
        self._runtime.synchronize()
        self._captures.clear()
        self._runtime.release()
        return work()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """What tensors are made or changed in; a graph's replay does without."""
        with torch.inference_mode(), self._runtime.stream():
            yield

    def _next_capture(self) -> Key | None:
        if self._kernels.unsure:
            long = now_ns() - self._busy_ns > LONG_PAUSE_NS
            return self._captures.next(lambda key: long)
        return self._captures.next(self._kernels.ready)

    def _run_padded(self, key: Key) -> None:
        shape, needs = key
        self._runtime.enter()
        index = self._take_place()
        self._inputs.pad(shape, index)
        try:
            with self._working():
                step = self._segment(shape, needs or GREEDY, apart=needs is None)
                if needs is None:
                    self._chooser.choose(Launched(step.view, None, GREEDY), pdl=step.view.pdl)
            self._pass(index)
        finally:
            self._places[index].end.record()

    def _tell_captured(self) -> None:
        log.info(
            "%d steps are captured, with %.0f MiB for all of them; the longest pause was %.0f ms",
            len(self._captures),
            self._runtime.graph_bytes() / (1 << 20),
            self._slowest_ns / 1e6,
        )

    def _pass(self, index: int) -> None:
        """The turn goes to the next place, as it does on the device with the step's last kernel. A step that could not
        be launched to its end leaves it here and there where it was."""
        self._next = (index + 1) % RING

    def _take_place(self) -> int:
        """The place of the ring whose turn it is, once what had it has ended and was read."""
        self.settle()
        index = self._next
        flying, self._flying[index] = self._flying[index], None
        if flying is not None:
            flying.result()
        else:
            self._places[index].end.synchronize()
        self._places[index].staging.reset()
        return index

    def _apply(self, plan: StepPlan, staging: Staging) -> list[tuple[int, int, int]]:
        """Apply the plan's changes; what is left of them are patches of block tables."""
        for slot in plan.retire:
            self._sampler.retire(slot)
            self._prompts.retire(slot)
            self._holds.retire(slot)
        if plan.starts:
            self._start(plan.starts, staging)
        return self._rows.patches(plan.blocks) if plan.blocks else []

    def _start(self, starts: list[RowStart], staging: Staging) -> None:
        """One launch for all of them, on the stream that `submit` has entered."""
        self._kernels.wait_first(1)  # any key's kernels include the one that starts rows
        states = []
        for row in starts:
            # Only what makes tensors enters the stream and the mode anew, which costs as much as all else of a start.
            with contextlib.nullcontext() if row.params.prompt_logprobs is None else self._working():
                self._prompts.start(row)
            masked = self._holds.start(row)
            stop_ids = () if masked else row.stop_ids
            states.append(self._sampler.take(row.slot, row.params, row.seed, row.num_prompt, stop_ids, masked=masked))
            if not self._sampler.is_plain(row.slot):
                self._equip(row, stop_ids)
        self._rows.start(starts, states, staging)

    def _equip(self, row: RowStart, stop_ids: Sequence[int]) -> None:
        known = np.frombuffer(row.tokens, dtype="<u4")
        with self._working():
            self._with_memory(lambda: self._sampler.equip(row.slot, row.params, known, stop_ids))

    def _shape(self, plan: StepPlan) -> StepShape:
        # Deterministic: one attention kernel for every token, so that its bits are those of any later computing.
        deterministic, last = self._config.deterministic, plan.work[-1]
        if last.count == 1 and last.sample and not deterministic:  # decode rows come first, so there are no others
            return self._decode_shapes[len(plan.work)]
        decodes, chunks, sampling = 0, [], 0
        for row in plan.work:
            if row.count == 1 and row.sample and not deterministic:
                decodes += 1
            else:
                chunks.append(row.count)
                sampling += row.sample
        return self.table.shape(decodes, chunks, sampling)

    def _run(self, shape: StepShape, needs: Needs, *, apart: bool = False) -> tuple[bool, Launched | None]:
        """Launch the step's graph, or what it would hold one by one: whether there was a graph, and the first segment
        alone where the second is to be launched ``apart``."""
        for able in (GREEDY, RANDOM):
            if not needs.value & ~able.value and (graph := self._captures.get((shape, able))):
                graph.replay()
                return True, None
        # The kernels that are compiled ahead are those of all random steps. By value: flags take a microsecond to join.
        if needs.value & RANDOM.value:
            needs |= RANDOM
        model = self._captures.get((shape, None))
        if model is None:
            return self._run_first(shape, needs, apart=apart)
        model.replay()
        step = Launched(model.view, model.logits(), needs, model)
        if not apart:
            with self._working():
                self._chooser.choose(step, pdl=step.view.pdl)
        return True, step if apart else None

    def _run_first(self, shape: StepShape, needs: Needs, *, apart: bool) -> tuple[bool, Launched | None]:
        """As `_run`, for a step without a graph."""
        key = shape, class_of(needs)
        # Launching one by one takes the host as long as capturing. Once, so that all kernels are loaded, is enough.
        again = key in self._launched and self._captures.may_have(key)
        if again and self._attempt(key, lambda: self._captures.add(key, self._captured(key))):
            return self._run(shape, needs, apart=apart)
        self._captures.missed(key)
        self._kernels.wait(key)
        with self._working():
            step = self._with_memory(lambda: self._segment(shape, needs, apart=apart))
        self._launched.add(key)
        log.debug("launched kernel by kernel: %s", key)
        return False, step if apart else None

    def _run_reading(
        self, shape: StepShape, needs: Needs, wanted: list[Wanted], *, apart: bool
    ) -> tuple[list[Read], Launched | None]:
        """Launch a step kernel by kernel, and what reads the hidden states of prompts in it; ``apart`` as in `_run`."""
        places = np.concatenate([np.arange(one.first, one.end) for one in wanted])
        view = self._view(shape)

        def work() -> tuple[list[Read], Launched]:
            kept = Kept(to_device(places, self._runtime.device))
            self._inputs.receive(view, shape, self._state)
            step = Launched(view, self._model.forward(view, kept), needs)
            assert kept.hidden is not None, "the model kept nothing"
            reads = self._prompts.read(wanted, torch.split(kept.hidden, [one.end - one.first for one in wanted]))
            if not apart:
                self._chooser.choose(step, pdl=view.pdl)
            return reads, step

        with self._working():
            reads, step = self._with_memory(work)
        return reads, step if apart else None

    def _segment(self, shape: StepShape, needs: Needs, *, apart: bool = False) -> Launched:
        """Everything from a step's inputs to its result, or up to the logits."""
        view = self._view(shape)
        self._inputs.receive(view, shape, self._state)
        step = Launched(view, self._model.forward(view), needs)
        if not apart:
            self._chooser.choose(step, pdl=view.pdl)
        return step

    def _choose_held(self, index: int, held: HeldRows, step: Launched) -> None:
        """The device computes the step's hidden states while the host waits here for the tokens before them."""
        try:
            for earlier in range(index + 1, index + RING):
                flying = self._flying[earlier % RING]
                if flying is not None and flying.held is not None:
                    flying.result()
            held.choose(self._chooser, step)
        except BaseException:
            self._flying[index] = None  # it has no result
            raise
        self._pass(index)

    def _view(self, shape: StepShape) -> StepView:
        pdl = shape.decode_only and shape.tokens <= SMALL_ROWS
        return self._inputs.view(shape, self._rows.tokens, self._rows.block_tables, pdl=pdl)

    def _read(
        self,
        step_id: int,
        index: int,
        shape: StepShape,
        sampled: list[int],
        wanted: list[int | None],
        captured: bool,
        reads: list[Read],
        held: HeldRows | None,
    ) -> StepResult:
        self._places[index].end.synchronize()
        began_there, ended_there = self._results.times(index)
        now = now_ns()
        ended = self._clock.host_ns(ended_there, now)
        device_ns = ended_there - began_there
        samples = self._results.read(index, sampled, wanted)
        times = None if held is None else held.finish(samples, now - ended)
        return StepResult(
            step_id=step_id,
            samples=results(reads, samples) if reads else samples,
            started_ns=ended - device_ns,
            ended_ns=ended,
            forward_ns=device_ns,
            captured=captured,
            typical=captured,
            graph=shape.key,
            shape_tokens=shape.tokens,
            held=times,
        )
