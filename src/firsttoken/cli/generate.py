"""``firsttoken generate``: answers to prompts from the command line or a JSONL file."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firsttoken.cli.grammar_options import add_grammar_options, grammar_fields
from firsttoken.cli.options import (
    add_engine_options,
    add_log_level,
    add_model_argument,
    add_sampling_options,
    engine_args,
    sampling_fields,
)
from firsttoken.cli.streams import is_terminal
from firsttoken.core.errors import ConfigError

if TYPE_CHECKING:
    from firsttoken.cli.conversation import LocalSource
    from firsttoken.cli.jobs import Answer, Job
    from firsttoken.core.engine_args import EngineArgs
    from firsttoken.transport.channel import EngineHandle
    from firsttoken.transport.messages import EngineInfo

NAME = "generate"
HELP = "answer prompts from the command line or a JSONL file"
EPILOG = """\
A line of the input is {"prompt": "text" or [token ids]} or {"messages": [{"role": ..., "content": ...}]}, with
sampling fields (temperature, max_tokens, stop, n, logprobs, ...) and an "id" if wanted. Answers keep the order; what
is computed first follows "service_class" (p0, p1, p2) and, inside one, "priority" (lower first).

examples:
  firsttoken generate --prompt "The capital of France is" --max-tokens 8
  firsttoken generate --input prompts.jsonl --output answers.jsonl
  firsttoken generate model.gguf --prompt "Hello" --prompt "Bonjour" --json
  firsttoken generate --chat --prompt "Is the sky blue?" --choice yes --choice no
"""

MAX_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt, taken as it is (may be repeated)")
    source.add_argument("--input", type=Path, metavar="FILE", help="prompts or chats, one JSON object a line")
    parser.add_argument("--chat", action="store_true", help="each --prompt is a user's message to the chat template")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write one JSON object an answer to this file")
    parser.add_argument("--json", action="store_true", help="one JSON object with all answers on stdout")
    add_log_level(parser, "warning")
    add_sampling_options(parser, max_tokens=MAX_TOKENS)
    add_grammar_options(parser)
    add_engine_options(parser, without=("served_model_name", "seed"))


def run(options: argparse.Namespace) -> int:
    from firsttoken.engine.launch import engine_process

    if options.chat and options.input is not None:
        raise ConfigError('--chat goes with --prompt: in --input, a line with "messages" is a chat')
    defaults = {"max_tokens": MAX_TOKENS, **sampling_fields(options), **grammar_fields(options)}
    jobs = _jobs(options, defaults)
    args = engine_args(options)
    alone = options.prompt and len(jobs) == 1 and options.output is None and not options.json
    if alone and is_terminal(sys.stdout):
        return _stream(args, jobs[0], defaults)
    with ExitStack() as stack:
        output = None
        if options.output is not None:
            if options.input is not None and _same(options.input, options.output):
                raise ConfigError(f"--output {options.output} is the --input: it would be lost")
            try:
                # Not emptied yet: should the model not load, an earlier run's answers are still there.
                output = stack.enter_context(options.output.open("a", encoding="utf-8"))
            except OSError as error:
                raise ConfigError(f"cannot write --output {options.output}: {error.strerror}") from None
        answers: list[Answer] = []

        def take(done: list[Answer]) -> None:
            if output is not None and not answers and options.output.is_file():
                output.truncate(0)
            answers.extend(done)
            for answer in done:
                if output is not None:
                    output.write(json.dumps(answer.as_dict(), ensure_ascii=False) + "\n")
                elif not options.json:
                    _show(answer, with_prompt=len(jobs) > 1)

        handle = stack.enter_context(engine_process(args))
        import asyncio

        info = asyncio.run(_compute(args, handle, jobs, defaults, take))
    if options.json:
        from firsttoken.cli import report

        print(json.dumps({"outputs": [answer.as_dict() for answer in answers], **report.header(info)}))
    return 1 if any(answer.error for answer in answers) else 0


def _stream(args: EngineArgs, job: Job, defaults: dict[str, Any]) -> int:
    """The only answer, as it comes, for a person who waits for it."""
    from firsttoken.engine.launch import engine_process

    with engine_process(args) as handle:
        from firsttoken.cli.conversation import LocalSource
        from firsttoken.cli.progress import loading

        with loading(args.model):
            source = LocalSource(args, defaults, handle)
        return _show_stream(source, job)


def _show_stream(source: LocalSource, job: Job) -> int:
    """Print what comes, and close ``source``."""
    from firsttoken.cli.terminal import show
    from firsttoken.core.errors import InvalidRequest
    from firsttoken.frontend.failures import GenerationFailed

    began = False
    try:
        for piece in source.answer(job):
            began = began or bool(piece)
            show(piece, sys.stdout)
    except (InvalidRequest, GenerationFailed) as error:
        if began:
            print(flush=True)
        print(f"firsttoken generate: prompt 1: {error}", file=sys.stderr)
        return 1
    except BaseException:  # Ctrl-C, a dead engine: what was printed stays, on a line of its own
        if began:
            print(flush=True)
        raise
    finally:
        source.close()
    print(flush=True)
    return 0


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them is not there
        return False


def _jobs(options: argparse.Namespace, defaults: dict[str, Any]) -> list[Job]:
    from firsttoken.cli.jobs import Job, read_file

    if options.input is not None:
        return read_file(options.input, defaults)
    if options.chat:
        return [Job(messages=[{"role": "user", "content": text}]) for text in options.prompt]
    return [Job(prompt=text) for text in options.prompt]


async def _compute(
    args: EngineArgs, handle: EngineHandle, jobs: list[Job], defaults: dict[str, Any], take: Any
) -> EngineInfo:
    from firsttoken.cli.batch import run_jobs
    from firsttoken.cli.progress import count_progress, loading
    from firsttoken.frontend.async_llm import AsyncLLM

    with loading(args.model):
        llm = await AsyncLLM.launch(args, handle=handle)
    try:
        with count_progress("answering", len(jobs)) as update:
            await run_jobs(
                llm,
                jobs,
                defaults,
                on_answers=take,
                on_progress=lambda done, tokens: update(done, f"{tokens} tokens"),
            )
        return llm.info
    finally:
        await llm.shutdown()


def _show(answer: Answer, *, with_prompt: bool) -> None:
    where = f"[{answer.prompt_index + 1}] " if with_prompt else ""
    if answer.error is not None:
        print(f"firsttoken generate: prompt {answer.prompt_index + 1}: {answer.error}", file=sys.stderr)
    else:
        print(f"{where}{answer.text}", flush=True)
