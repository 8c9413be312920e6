"""The self-check of a start: what the loaded weights think of the prompts of the reference in their folder.

Plans go to the executor as a scheduler's would: the prompts' beginnings as chunks of one step, then one token of each
at a time. A row starts anew for each position, as one does whose KV is cached, with the text's next token forced on it,
so that its log-probability is told beside the likeliest.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.checkpoint.quantized.scheme import FORMATS
from firsttoken.checkpoint.self_check import FILE, Limits, Reference, read_reference
from firsttoken.core.agreement import LEAST_LOGPROB, Guess, SelfCheck, compare, perplexity
from firsttoken.core.clock import NS_PER_S, now_ns
from firsttoken.core.errors import CheckpointError
from firsttoken.core.plan import RowSample, RowStart, RowWork, StepPlan
from firsttoken.core.sampling_params import MAX_LOGPROBS, SamplingParams
from firsttoken.executor.config import ExecutorConfig
from firsttoken.executor.interface import Executor

# A slow machine leaves positions out rather than keep a server from starting.
MOST_S = 4.0
# The most that OpenAI allows; a token so far above the others is chosen.
_FORCED = 100.0
_FIRST_STEP = -1_000_000  # no step of the scheduler's, nor of the warm-up's


def self_check(executor: Executor, config: ExecutorConfig, checkpoint: Checkpoint) -> SelfCheck | None:
    """The figures; None where the folder holds no reference, or none of its positions fits this engine. Raises
    `CheckpointError` for weights that do not compute what they did when it was recorded."""
    reference = read_reference(checkpoint)
    if reference is None:
        return None
    path = str(Path(checkpoint.path))
    found = _guesses(executor, config, reference, path)
    if not found:
        return None
    ours = list(found.values())
    if not _rounds_more(config, checkpoint):
        _refuse_broken(ours, _of(reference, reference.own, found), reference.limits, path)
    theirs = _of(reference, reference.guesses, found)
    return SelfCheck(
        tokens=len(ours),
        **compare(ours, theirs),
        perplexity=perplexity(ours),
        reference_perplexity=perplexity(theirs),
    )


def _of(reference: Reference, guesses: Sequence[Guess], found: Iterable[tuple[int, int]]) -> list[Guess]:
    """Those of the positions that were found."""
    by_position = dict(zip(reference.positions(), guesses, strict=True))
    return [by_position[position] for position in found]


def _rounds_more(config: ExecutorConfig, checkpoint: Checkpoint) -> bool:
    """Whether this engine was asked to round what the folder has in full: how far that may lead is its owner's to say,
    and the figures tell him."""
    weights = config.quantization in FORMATS and checkpoint.config.quantized is None
    return weights or config.kv_format.dtype not in ("float32", "bfloat16")


def describe_check(checked: SelfCheck) -> str:
    return (
        f"the same likeliest token at {checked.top1_agreement:.1%} of {checked.tokens} positions, "
        f"KL {checked.kl:.4f} nats, perplexity {checked.perplexity:.2f} (reference {checked.reference_perplexity:.2f})"
    )


def _refuse_broken(ours: Sequence[Guess], own: Sequence[Guess], limits: Limits | None, path: str) -> None:
    """The folder's weights against what they were. Of few positions each one weighs more, and may differ by chance."""
    if limits is None:
        return
    found = compare(ours, own)
    least = max(limits.min_top1_agreement - len(ours) ** -0.5, 0.0)
    if found["top1_agreement"] >= least and found["kl"] <= limits.max_kl:
        return
    raise CheckpointError(
        f"the weights do not compute what they did when {FILE} was recorded: the same likeliest token at "
        f"{found['top1_agreement']:.1%} of {len(ours)} positions (at least {least:.1%} are asked for), KL "
        f"{found['kl']:.4f} nats (at most {limits.max_kl:.4f}). Get the files again or make them anew, or start with "
        "--no-self-check to run them as they are",
        file=path,
    )


def _guesses(
    executor: Executor, config: ExecutorConfig, reference: Reference, path: str
) -> dict[tuple[int, int], Guess]:
    """By prompt and number of known tokens: of all positions, or of those that time and this engine's sizes allow."""
    until = now_ns() + int(MOST_S * NS_PER_S)
    found: dict[tuple[int, int], Guess] = {}
    for number, (positions, plan) in enumerate(_steps(config, reference)):
        if number and now_ns() > until:
            break
        for (prompt, known), sample in zip(positions, executor.submit(plan).result().samples, strict=True):
            found[prompt, known] = _guess(sample, reference.prompts[prompt][known], path)
    return found


def _steps(config: ExecutorConfig, reference: Reference) -> Iterator[tuple[list[tuple[int, int]], StepPlan]]:
    """Each step's positions and plan: prompts in groups that fit the engine, each group token by token."""
    prompts, given = reference.prompts, reference.given
    longest = min(max(map(len, prompts)), config.max_model_len)
    blocks = config.kv_format.blocks_for(longest)
    rows = min(config.max_num_seqs, config.max_step_tokens // given, config.kv_blocks // blocks)
    step_id, taken = _FIRST_STEP, list[int]()
    for first in range(0, len(prompts), rows) if rows else ():
        for known in range(given, longest):
            group = range(first, min(first + rows, len(prompts)))
            positions = [(prompt, known) for prompt in group if known < len(prompts[prompt])]
            slots = [prompt - first for prompt, _ in positions]
            starts = [
                _start(slot, prompts[prompt][: known + 1], range(slot * blocks, (slot + 1) * blocks))
                for slot, (prompt, _) in zip(slots, positions, strict=True)
            ]
            # Beginnings are alone in their steps; after them only the last token of those known is to be computed.
            at = 0 if known == given else known - 1
            work = [RowWork(slot, at, known - at, True) for slot in slots]
            if work:
                yield positions, StepPlan(step_id=step_id, work=work, starts=starts, retire=taken)
                step_id, taken = step_id + 1, slots


def _start(slot: int, tokens: Sequence[int], blocks: Sequence[int]) -> RowStart:
    """A row that knows all ``tokens`` but the last, which is forced on it."""
    return RowStart(
        slot=slot,
        request_id=0,
        tokens=array("I", tokens[:-1]).tobytes(),
        num_prompt=len(tokens) - 1,
        params=_forced(tokens[-1]),
        seed=0,
        blocks=list(blocks),
    )


def _forced(token: int) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=1, logprobs=MAX_LOGPROBS, logit_bias={token: _FORCED}, ignore_eos=True
    )


def _guess(sample: RowSample, token: int, path: str) -> Guess:
    told = sample.logprobs
    if sample.error is not None or told is None or not told.top_ids:
        raise CheckpointError(
            f"the self-check found logits that are not finite ({sample.error or 'no token is possible'}): the weights "
            "are damaged or do not fit --dtype and --quantization; get them again, or try others of these",
            file=path,
        )
    # One that even the bias could not lift above the others has no probability to speak of.
    logprob = max(told.logprob, LEAST_LOGPROB) if sample.token == token else LEAST_LOGPROB
    return Guess(logprob, tuple(zip(told.top_ids, told.top_logprobs, strict=True)))
