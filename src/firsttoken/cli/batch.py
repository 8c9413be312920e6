"""Runs a list of jobs through an engine, many at once, and hands the answers back in the jobs' order."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from firsttoken.cli.jobs import Answer, Job
from firsttoken.core.errors import InvalidRequest, Overloaded
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.frontend.admission import token_ids
from firsttoken.frontend.failures import GenerationFailed
from firsttoken.frontend.outputs import default_params

if TYPE_CHECKING:
    from firsttoken.checkpoint.model_config import GenerationConfig
    from firsttoken.frontend.async_llm import AsyncLLM


def sampling(generation: GenerationConfig, *layers: dict[str, Any]) -> SamplingParams:
    """The model's own sampling values, each layer over the one before; where the model has no temperature, greedy."""
    fields: dict[str, Any] = {} if generation.temperature is not None else {"temperature": 0.0}
    for layer in layers:
        fields.update(layer)
    return default_params(generation).replace(**fields)


async def run_jobs(
    llm: AsyncLLM,
    jobs: Sequence[Job],
    defaults: dict[str, Any],
    *,
    on_answers: Callable[[list[Answer]], None],
    on_progress: Callable[[int, int], None] = lambda done, tokens: None,
) -> None:
    """Compute all jobs, best class and lowest priority first. ``on_answers`` gets each job's answers, in the order of
    ``jobs``, as soon as those before it are known too; ``on_progress`` gets jobs done and tokens so far.

    A job that the engine refuses gives an `Answer` with ``error``; a dead engine raises `EngineDead`.
    """
    # Enough to keep every row of the engine busy while finished ones are replaced, without opening a million at once.
    workers = min(len(jobs), 2 * llm.info.max_num_seqs)
    waiting = iter(sorted(enumerate(jobs), key=lambda item: (item[1].terms.service, item[1].terms.priority)))
    ready: dict[int, list[Answer]] = {}
    written = done = tokens = 0

    def take(index: int, answers: list[Answer]) -> None:
        nonlocal written, done
        ready[index] = answers
        done += 1
        on_progress(done, tokens)
        while written in ready:
            on_answers(ready.pop(written))
            written += 1

    def count(more: int) -> None:
        nonlocal tokens
        tokens += more
        on_progress(done, tokens)

    async def work() -> None:
        for index, job in waiting:
            take(index, await _let_in(llm, index, job, defaults, count))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(work())
    except BaseExceptionGroup as failures:
        # The first failure ended the others: it is the one to tell.
        raise failures.exceptions[0] from None


async def _let_in(
    llm: AsyncLLM, index: int, job: Job, defaults: dict[str, Any], count: Callable[[int], None]
) -> list[Answer]:
    """`_run_job`, again as long as the engine has no room for it."""
    while True:
        try:
            return await _run_job(llm, index, job, defaults, count)
        except Overloaded as error:
            await asyncio.sleep(error.retry_after_s)


async def _run_job(
    llm: AsyncLLM, index: int, job: Job, defaults: dict[str, Any], count: Callable[[int], None]
) -> list[Answer]:
    try:
        params = sampling(llm.generation_config, defaults, job.fields)
        generation = llm.open(await prompt_ids(llm, job), params, terms=job.terms)
    except InvalidRequest as error:
        return [Answer(index, key=job.key, error=str(error))]
    answers = [Answer(index, n, job.key) for n in range(params.n)]
    try:
        async for delta in generation:
            answer = answers[delta.index]
            answer.text += delta.text
            answer.token_ids.extend(delta.token_ids)
            answer.logprobs.extend(delta.logprobs or ())
            if delta.finish_reason is not None:
                answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
            count(len(delta.token_ids))
    except (InvalidRequest, GenerationFailed) as error:
        return [Answer(index, key=job.key, error=str(error))]
    finally:
        generation.cancel()
    for answer in answers:
        answer.prompt_tokens, answer.cached_tokens = generation.prompt_tokens, generation.cached_tokens
    return answers


async def prompt_ids(llm: AsyncLLM, job: Job) -> array[int]:
    """What the engine is asked for; raises `InvalidRequest`."""
    if job.messages is not None:
        return (await llm.render_chat(job.messages)).ids
    if isinstance(job.prompt, str):
        return await llm.tokenize(job.prompt)
    return token_ids(job.prompt or ())
