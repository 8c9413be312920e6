"""What it costs to hold answers to a JSON schema of 50 fields: in two libraries, and in the CPU engine.

*Libraries*: the same document is walked token by token over the model's vocabulary: compiling the schema (new, and seen
before), then a mask and a token each. llguidance is what the engine uses; xgrammar is measured where it is installed,
best in an environment of its own (`pip install torch xgrammar`). Other processes make medians of these more telling
than means.

*Steps*: two rows of the CPU's executor on one thread, a step of the held one and a step of the free one in turn: the
processor's time of each, with that of its mask and of looks after the answer's end, in pairs. Other processes change
little of that.

*Engine*: answers that are held and answers that are free, one of each in turn, of equally many tokens: the time to the
first token with the schema compiled already, and the median gap between tokens, as ratios of the two. `steps_us` tells
from a GPU engine's own records what a decode step of each took, medians in us: `every` from one's end to the next
one's, `device` by the device's clock from the first kernel to the last, `plan` from planning to launched, `harvest`
from the end until the loop had read it; and of held ones what the host did (`core.plan.HeldTimes`).

Of ratios the median is told with the interval that holds it in 95 of 100 draws of as many pairs (bootstrap).

    python benchmarks/grammar.py --output-json benchmarks/results/cpu/grammar.json
    python -m benchmarks.grammar --model FOLDER --device cuda --only engine    # does a GPU's step hide the mask?
    python -m benchmarks.grammar --model random:llama-3.1-8b --quantization int4 --tokenizer FOLDER --device cuda \
        --only engine                                                          # the same where a step takes 2 ms

Needs the model's files (`firsttoken pull smollm2`). Where ``--tokenizer`` names a folder, MODEL speaks with the
tokenizer of that one: a model of random weights has none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from firsttoken.bench.steps import StepsConfig, open_executor
from firsttoken.checkpoint.hf_write import config_values, write_config, write_text_files
from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.cli.report import header
from firsttoken.core.engine_args import DEFAULT_MODEL, EngineArgs
from firsttoken.core.grammar import Grammar
from firsttoken.core.plan import HeldTimes, RowStart, RowWork, StepPlan
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.step_record import StepRecord
from firsttoken.frontend.async_llm import AsyncLLM
from firsttoken.grammar.grammars import Grammars
from firsttoken.text.tokenizer import Tokenizer

FIELDS = 50
KINDS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "integer"},
    {"type": "array", "items": {"type": "integer"}},
    {"enum": ["red", "green", "blue"]},
]
PROMPT = "Here is a long JSON document with many fields:\n"
MAX_TOKENS = 1024
SETTLING = 8  # steps that make things ready
AFTER_S = 0.002
VALUES: list[Any] = ["some words of a text", 1234, [1, 2, 3], "green"]


def schema(salt: int = 0) -> str:
    properties = {f"field_{salt}_{index}": KINDS[index % len(KINDS)] for index in range(FIELDS)}
    return json.dumps(
        {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    )


def document(salt: int = 0) -> str:
    return json.dumps({f"field_{salt}_{index}": VALUES[index % len(VALUES)] for index in range(FIELDS)})


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return 1e6 * (time.perf_counter() - began), result


def spread(values: list[float]) -> dict[str, float]:
    return {"p50": round(statistics.median(values), 1), "p99": round(float(np.percentile(values, 99)), 1)}


class Guidance:
    name = "llguidance"

    def __init__(self, tokenizer: Tokenizer, end_ids: tuple[int, ...], vocab_size: int) -> None:
        from firsttoken.grammar.tokens import TokenTable

        self.table = TokenTable(tokenizer, end_ids, vocab_size)
        self.mask = np.zeros(self.table.mask_words, dtype=np.int32)

    def compile(self, source: str) -> Any:
        """As the engine does it: with the shortest text that fits, and what bounds the way to the end."""
        from firsttoken.grammar.compiled import Compiled

        return Compiled(Grammar("json_schema", source), self.table)

    def matcher(self, compiled: Any) -> Any:
        return compiled.token_matcher()

    def fill(self, matcher: Any) -> None:
        matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)

    def take(self, matcher: Any, token: int) -> bool:
        return bool(matcher.consume_token(token))


class XGrammar:
    name = "xgrammar"

    def __init__(self, tokenizer: Tokenizer, end_ids: tuple[int, ...], vocab_size: int) -> None:
        import xgrammar

        tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        info = xgrammar.TokenizerInfo(tokens, vocab_size=vocab_size, stop_token_ids=list(end_ids))
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self.mask = xgrammar.allocate_token_bitmask(1, vocab_size)
        self._matcher = xgrammar.GrammarMatcher

    def compile(self, source: str) -> Any:
        return self.compiler.compile_json_schema(source, any_whitespace=True)

    def matcher(self, compiled: Any) -> Any:
        return self._matcher(compiled)

    def fill(self, matcher: Any) -> None:
        matcher.fill_next_token_bitmask(self.mask)

    def take(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept_token(token))


def measure_library(kind: type[Guidance] | type[XGrammar], model: str, rounds: int) -> dict[str, Any]:
    checkpoint = open_checkpoint(model, offline=True)
    assert checkpoint.tokenizer is not None
    tokenizer = Tokenizer.build(checkpoint.tokenizer)
    vocab_size = checkpoint.config.vocab_size
    start_us, library = timed(lambda: kind(tokenizer, checkpoint.generation.eos_token_ids, vocab_size))
    compile_us: list[float] = []
    again_us: list[float] = []
    mask_us: list[float] = []
    first_us: list[float] = []
    take_us: list[float] = []
    for salt in range(rounds):
        took, compiled = timed(lambda salt=salt: library.compile(schema(salt)))  # type: ignore[misc]
        compile_us.append(took)
        again_us.append(timed(lambda compiled=compiled: library.matcher(compiled))[0])  # type: ignore[misc]
        matcher = library.matcher(compiled)
        for place, token in enumerate(tokenizer.plain_ids(document(salt))):
            took = timed(lambda matcher=matcher: library.fill(matcher))[0]  # type: ignore[misc]
            (mask_us if place else first_us).append(took)
            took, right = timed(lambda matcher=matcher, token=token: library.take(matcher, token))  # type: ignore[misc]
            assert right, f"{kind.name} takes no {tokenizer.token_text(token)!r} at token {place}"
            take_us.append(took)
    return {
        "library": kind.name,
        "vocabulary_ms": round(start_us / 1e3, 1),
        "compile_ms": {name: round(us / 1e3, 2) for name, us in spread(compile_us).items()},
        "copy_us": spread(again_us),
        "first_mask_us": spread(first_us),
        "mask_us": {**spread(mask_us), "max": round(max(mask_us), 1)},
        "take_us": spread(take_us),
    }


def measure_libraries(model: str, rounds: int) -> list[dict[str, Any]]:
    libraries = [measure_library(Guidance, model, rounds)]
    try:
        libraries.append(measure_library(XGrammar, model, rounds))
    except ImportError:
        print("xgrammar is not installed here")
    return libraries


def ratio(held: Sequence[float], free: Sequence[float]) -> dict[str, Any]:
    ratios = np.array(held) / np.array(free)
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return {
        "p50": round(float(np.median(ratios)), 4),
        "within": [round(float(low), 4), round(float(high), 4)],
        "of_means": round(float(np.mean(held) / np.mean(free)), 4),
        "pairs": len(ratios),
    }


def measure_steps(model: str, steps: int, rounds: int) -> dict[str, Any]:
    """Both answers of ``steps`` tokens, ``rounds`` times."""
    checkpoint = open_checkpoint(model, offline=True)
    assert checkpoint.tokenizer is not None
    prompt = Tokenizer.build(checkpoint.tokenizer).encode(PROMPT)
    engine = open_executor(EngineArgs(model=model, offline=True, threads=1), StepsConfig(max_rows=1))
    grammars = Grammars.of(checkpoint)
    engine.executor.hold_to(grammars)
    free = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
    rows = [free, free.replace(ignore_eos=False, grammar=Grammar("json_schema", schema()))]
    blocks = -(-(len(prompt) + steps) // engine.limits.block_tokens)
    spent: list[list[float]] = [[], []]
    try:
        for round_ in range(rounds):
            starts = [
                RowStart(
                    slot=slot,
                    request_id=slot,
                    tokens=prompt.tobytes(),
                    num_prompt=len(prompt),
                    params=params,
                    seed=0,
                    blocks=list(range(slot * blocks, (slot + 1) * blocks)),
                    max_tokens=MAX_TOKENS,
                )
                for slot, params in enumerate(rows)
            ]
            work = [RowWork(slot, 0, len(prompt), True) for slot in range(2)]
            engine.executor.submit(StepPlan(step_id=0, starts=starts, work=work)).result()
            for place in range(len(prompt), len(prompt) + steps - 1):
                for slot in (0, 1) if place % 2 else (1, 0):
                    began = time.process_time_ns()
                    plan = StepPlan(step_id=0, work=[RowWork(slot, place, 1, True)])
                    sample = engine.executor.submit(plan).result().samples[0]
                    assert sample.error is None, sample.error
                    time.sleep(AFTER_S)  # what is done beside the next plan belongs to this step
                    if round_ or place > len(prompt) + SETTLING:
                        spent[slot].append((time.process_time_ns() - began) / 1e3)
    finally:
        engine.executor.close()
        grammars.close()
    return {
        "threads": 1,
        "steps": steps,
        "rounds": rounds,
        "cpu_us": {name: spread(us) for name, us in zip(("free", "held"), spent, strict=True)},
        "ratio": ratio(spent[1], spent[0]),
    }


@contextlib.contextmanager
def speaking_as(model: str, tokenizer: str | None) -> Iterator[str]:
    """``model``, or one of its shape and of random weights that speaks with the tokenizer of a folder."""
    if tokenizer is None:
        yield model
        return
    words = open_checkpoint(tokenizer, offline=True)
    values = config_values(open_checkpoint(model, offline=True))
    ends = {"bos_token_id": words.generation.bos_token_id, "eos_token_id": list(words.generation.eos_token_ids)}
    with tempfile.TemporaryDirectory() as folder:
        write_text_files(words, Path(folder), None)
        write_config(Path(folder), values | ends)
        yield f"random:{folder}"


def median_us(values: Sequence[int]) -> float | None:
    return round(statistics.median(values) / 1e3, 1) if values else None


def step_times(records: Sequence[StepRecord]) -> dict[str, Any]:
    """Of decode steps alone, those of free answers and those of held ones; nothing of a device that works on masks
    itself, whose records do not tell which steps these are."""
    told: dict[str, Any] = {}
    if not any(one.held for one in records):
        return told
    for name in ("free", "held"):
        steps = [one for one in records if not one.prefill_tokens and (one.held is None) == (name == "free")]
        told[name] = {
            "steps": len(steps),
            "every": median_us([b.ended_ns - a.ended_ns for a, b in pairwise(steps) if b.step_id == a.step_id + 1]),
            "device": median_us([one.ended_ns - one.started_ns for one in steps]),
            "plan": median_us([one.submitted_ns - one.planned_ns for one in steps]),
            "harvest": median_us([one.harvested_ns - one.ended_ns for one in steps]),
        }
    times = [one.held for one in records if one.held is not None and not one.prefill_tokens]
    for field in HeldTimes.__struct_fields__:
        told["held"][field.removesuffix("_ns")] = median_us([getattr(one, field) for one in times])
    return told


async def measure_engine(engine: EngineArgs, tokens: int, rounds: int) -> dict[str, Any]:
    llm = await AsyncLLM.launch(engine)
    try:
        prompt = await llm.tokenize(PROMPT)
        free = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        # Room for the whole document, of which so many tokens are looked at.
        room = min(MAX_TOKENS, llm.info.max_model_len - len(prompt))
        held = SamplingParams(max_tokens=room, temperature=0, grammar=Grammar("json_schema", schema()))
        first: dict[str, list[float]] = {"free": [], "held": []}
        gaps: dict[str, list[float]] = {"free": [], "held": []}
        first_step = 0
        for round_ in range(rounds + 1):
            if round_ == 1:  # the first made things ready
                first_step = max([step.step_id for step in llm.steps.last(1)], default=0)
            for name, params in (("free", free), ("held", held)):
                began = last = time.perf_counter()
                generation = llm.open(prompt, params)
                seen, times = 0, []
                async for delta in generation:
                    now = time.perf_counter()
                    times.append(now - last)
                    last = now
                    seen += len(delta.token_ids)
                    if seen >= tokens:
                        generation.cancel()
                if round_:
                    first[name].append(1e3 * times[0])
                    gaps[name].append(1e3 * statistics.median(times[1:]))
                else:
                    print(f"{name}: the first answer took {1e3 * (last - began):.0f} ms")
        added = [h - f for h, f in zip(first["held"], first["free"], strict=True)]
        return {
            "tokens": tokens,
            "rounds": rounds,
            "ttft_ms": {name: round(statistics.median(values), 2) for name, values in first.items()},
            "ttft_added_ms": round(statistics.median(added), 2),
            "gap_ms": {name: round(statistics.median(values), 3) for name, values in gaps.items()},
            "gap_ratio": ratio(gaps["held"], gaps["free"]),
            "steps_us": step_times(llm.steps.since(first_step)),
        }
    finally:
        await llm.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400, help="tokens of an answer in the measurement of steps")
    parser.add_argument("--device", default="auto", help="of the engine")
    parser.add_argument("--quantization", default="auto", help="of the engine")
    parser.add_argument("--max-model-len", type=int, help="of the engine")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="with which the engine's model speaks")
    parser.add_argument("--only", choices=("libraries", "steps", "engine"), action="append")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    wanted = args.only or ["libraries", "steps", "engine"]
    result: dict[str, Any] = {**header(), "model": args.model, "fields": FIELDS}
    if "libraries" in wanted:
        result["libraries"] = measure_libraries(args.model, args.rounds)
    if "steps" in wanted:
        result["steps"] = measure_steps(args.model, args.steps, 2)
    if "engine" in wanted:
        with speaking_as(args.model, args.tokenizer) as model:
            engine = EngineArgs(
                model=model,
                device=args.device,
                quantization=args.quantization,
                max_model_len=args.max_model_len,
                offline=True,
            )
            result["engine"] = asyncio.run(measure_engine(engine, args.tokens, args.rounds))
    print(json.dumps(result, indent=2))
    if args.output_json:
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        args.output_json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
