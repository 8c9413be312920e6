"""``bench steps``: a table of measured steps, taken straight on an executor. A simulator's model of a device.

Rows are started as the prefix cache starts them: with blocks whose KV is there already. All blocks are filled with KV
of real tokens once, by short prompts; after that any block stands for any other, since the time of a step depends on
how many tokens it reads and not on which. No block is in two rows of a step, so each row's KV is read from memory.
"""

from __future__ import annotations

import random
import statistics
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from firsttoken.bench.errors import BenchFailed
from firsttoken.bench.step_grid import Cell, Limits, grid
from firsttoken.core.clock import NS_PER_MS, now_ns
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.plan import RowStart, RowWork, StepPlan, StepResult
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.executor.interface import Executor

Say = Callable[[str], None]

# Prompts that fill the KV: short ones, whose attention costs little.
FILL_TOKENS = 512
WARM = 2  # unmeasured steps of each cell: the first one carries the rows' start
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, kw_only=True)
class StepsConfig:
    """``repeat`` measured steps of each cell, whose median counts; ``max_*`` bound the grid (in tokens and rows)."""

    repeat: int = 5
    max_rows: int = 64
    max_context: int = 8192
    max_prefill: int = 8192
    seed: int = 0

    @property
    def growth(self) -> int:
        """Tokens that a decode row gains while its cell is measured, and one that is sampled but not computed."""
        return WARM + self.repeat + 1


@dataclass(frozen=True)
class Engine:
    """An executor without a loop around it, and what it was made with."""

    executor: Executor
    info: dict[str, Any]  # as `EngineInfo` names it
    limits: Limits
    vocab_size: int


def open_executor(args: EngineArgs, config: StepsConfig) -> Engine:
    """Load ``args.model`` into an executor that can run the grid, as far as memory goes.

    Options that ``args`` leave open are set to what the grid needs. Raises what the start of an engine raises.
    """
    import msgspec

    from firsttoken.checkpoint.locate import open_checkpoint
    from firsttoken.core.errors import naming_file
    from firsttoken.devices.registry import known_devices
    from firsttoken.engine.resolve import resolve

    checkpoint = open_checkpoint(args.model, offline=args.offline, revision=args.revision)
    longest = min(config.max_context + config.max_prefill + config.growth, checkpoint.config.max_position)
    args = msgspec.structs.replace(
        args,
        max_model_len=longest if args.max_model_len is None else args.max_model_len,
        max_num_seqs=config.max_rows + 1,
        prefill_tokens=config.max_prefill + config.max_rows if args.prefill_tokens is None else args.prefill_tokens,
    )
    device, resolved = resolve(args, checkpoint, known_devices())
    with naming_file(checkpoint.path):
        executor = device.load(resolved.executor, checkpoint)
    made = resolved.executor
    limits = Limits(
        rows=min(made.max_num_seqs, config.max_rows + 1),
        length=min(made.max_model_len, longest),
        step=resolved.budget.most,
        blocks=made.kv_blocks,
        block_tokens=made.kv_format.block_tokens,
        growth=config.growth,
    )
    info = {
        "device": made.device,
        "device_name": device.facts().name,
        "model": resolved.model,
        "dtype": made.dtype,
        "quantization": made.quantization,
        "kv_dtype": made.kv_format.dtype,
    }
    return Engine(executor, info, limits, checkpoint.config.vocab_size)


def measure_steps(engine: Engine, config: StepsConfig, say: Say = lambda text: None) -> list[dict[str, Any]]:
    """A row for each cell of the grid that fits: the cell, and medians over ``config.repeat`` steps.

    ``ms``, ``forward_ms`` and ``sample_ms`` are the executor's own times of the step and its two segments, ``wall_ms``
    from submitting the plan to having the result. Raises `BenchFailed` when a row's logits were not finite.
    """
    cells = [
        cell
        for cell in grid(engine.limits)
        if cell.decode_rows <= config.max_rows
        and cell.context <= config.max_context
        and cell.prefill_tokens <= config.max_prefill
    ]
    if not cells:
        raise BenchFailed("no step of the grid fits: give more --kv-memory, or a larger --max-model-len")
    runner = _Runner(engine, random.Random(config.seed))
    say(f"filling the KV of {max(map(engine.limits.blocks_of, cells))} blocks")
    runner.fill(max(map(engine.limits.blocks_of, cells)))
    rows = []
    for number, cell in enumerate(cells, 1):
        say(f"step {number} of {len(cells)}: {cell}")
        rows.append(_row(cell, runner.measure(cell, config.repeat)))
    return rows


@dataclass(frozen=True)
class _Step:
    result: StepResult
    wall_ns: int


def _row(cell: Cell, steps: Sequence[_Step]) -> dict[str, Any]:
    def median_ms(values: Iterable[int]) -> float:
        return round(statistics.median(values) / NS_PER_MS, 4)

    return {
        "kind": cell.kind,
        "tokens": cell.tokens,
        "rows": cell.rows,
        "decode_rows": cell.decode_rows,
        "context": cell.context,
        "prefill_tokens": cell.prefill_tokens,
        "prefill_start": cell.prefill_start,
        "ms": median_ms(step.result.ended_ns - step.result.started_ns for step in steps),
        "forward_ms": median_ms(step.result.forward_ns for step in steps),
        "sample_ms": median_ms(step.result.sample_ns for step in steps),
        "wall_ms": median_ms(step.wall_ns for step in steps),
        "min_ms": round(min(step.result.ended_ns - step.result.started_ns for step in steps) / NS_PER_MS, 4),
    }


@dataclass
class _Runner:
    """Makes plans and runs them one by one. ``live`` are the slots that hold a row."""

    engine: Engine
    rng: random.Random
    live: list[int] = field(default_factory=list)
    steps: int = 0

    def fill(self, blocks: int) -> None:
        """Give each of the first ``blocks`` blocks KV."""
        limits = self.engine.limits
        # The last slot of the last block of a prompt is the sampled token's, which no plan here computes.
        tokens = max(1, min(FILL_TOKENS, limits.length - 1, limits.step))
        per_prompt = -(-tokens // limits.block_tokens)
        at_once = max(1, min(limits.rows, limits.step // tokens))
        prompts = [list(range(first, min(first + per_prompt, blocks))) for first in range(0, blocks, per_prompt)]
        for first in range(0, len(prompts), at_once):
            batch = prompts[first : first + at_once]
            counts = [min(tokens, len(prompt) * limits.block_tokens) for prompt in batch]
            starts = [
                self._start(slot, count, prompt) for slot, (count, prompt) in enumerate(zip(counts, batch, strict=True))
            ]
            self._submit([RowWork(slot, 0, count, False) for slot, count in enumerate(counts)], starts)

    def measure(self, cell: Cell, repeat: int) -> list[_Step]:
        """``repeat`` steps of this cell after `WARM` unmeasured ones; decode rows gain a token with each."""
        limits = self.engine.limits
        per_row = -(-(cell.context + limits.growth) // limits.block_tokens)
        decode = [
            self._start(slot, cell.context + 1, list(range(slot * per_row, (slot + 1) * per_row)))
            for slot in range(cell.decode_rows)
        ]
        first = cell.decode_rows * per_row
        prompt_blocks = list(range(first, first + -(-(cell.prefill_end + 1) // limits.block_tokens)))
        found = []
        for step in range(WARM + repeat):
            work = [RowWork(slot, cell.context + step, 1, True) for slot in range(cell.decode_rows)]
            starts = decode if step == 0 else []
            if cell.prefill_tokens:
                # The prompt's row begins again each time, at the chunk's start, as after a hit in the prefix cache.
                work.append(RowWork(cell.decode_rows, cell.prefill_start, cell.prefill_tokens, True))
                starts = [*starts, self._start(cell.decode_rows, cell.prefill_end, prompt_blocks)]
            keep = [] if step == 0 else range(cell.decode_rows)
            found.append(self._submit(work, starts, keep=keep))
        return found[WARM:]

    def _start(self, slot: int, known: int, blocks: list[int]) -> RowStart:
        tokens = array("I", self.rng.choices(range(self.engine.vocab_size), k=known))
        return RowStart(
            slot=slot,
            request_id=slot,
            tokens=tokens.tobytes(),
            num_prompt=known,
            params=GREEDY,
            seed=0,
            blocks=blocks,
        )

    def _submit(self, work: list[RowWork], starts: list[RowStart], *, keep: Iterable[int] = ()) -> _Step:
        kept = set(keep)
        retire = [slot for slot in self.live if slot not in kept]
        self.live = [*sorted(kept), *(row.slot for row in starts)]
        self.steps += 1
        plan = StepPlan(step_id=self.steps, work=work, starts=starts, retire=retire)
        began = now_ns()
        result = self.engine.executor.submit(plan).result()
        wall = now_ns() - began
        bad = [sample.error for sample in result.samples if sample.error is not None]
        if bad:
            raise BenchFailed(f"{len(bad)} of {len(work)} rows of a step failed, the first one: {bad[0]}")
        return _Step(result, wall)
