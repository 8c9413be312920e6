"""The work list of ``firsttoken generate``: prompts from the command line or from JSON lines, and the answers' form."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from firsttoken.core.errors import ConfigError, InvalidRequest
from firsttoken.core.grammar import Grammar
from firsttoken.core.plan import TokenLogprobs
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import DEFAULT_TERMS, Terms, class_named
from firsttoken.core.structured_outputs import structured_outputs_of

MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt: either ``prompt`` (text or token ids) or ``messages``; ``fields`` are its own sampling values,
    ``key`` its line's ``id``, given back with the answer, ``terms`` say what goes first."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    key: str | int | None = None
    terms: Terms = DEFAULT_TERMS


@dataclass(slots=True)
class Answer:
    """What came of a job: one of its ``n`` answers, or why there is none."""

    prompt_index: int
    index: int = 0
    key: str | int | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The JSON form; ``id``, ``logprobs`` and ``error`` only where there are such."""
        out: dict[str, Any] = {"prompt_index": self.prompt_index, "index": self.index}
        if self.key is not None:
            out["id"] = self.key
        if self.error is not None:
            return {**out, "finish_reason": "error", "error": self.error}
        for name in ("text", "token_ids", "finish_reason", "stop_reason", "prompt_tokens", "cached_tokens"):
            out[name] = getattr(self, name)
        if self.logprobs:
            out["logprobs"] = [
                {"logprob": at.logprob, "rank": at.rank, "top": dict(zip(at.top_ids, at.top_logprobs, strict=True))}
                for at in self.logprobs
            ]
        return out


class _Line(msgspec.Struct, kw_only=True):
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    id: str | int | None = None
    service_class: str = "p2"
    priority: int = 0


_OWN = _Line.__struct_fields__
_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse_line(raw: bytes, defaults: dict[str, Any]) -> Job:
    """A job from one JSON object: ``prompt`` or ``messages``, optionally ``id``, ``service_class``, ``priority`` and
    fields of `SamplingParams`.

    ``defaults`` are the sampling values that the line's own go over. Raises ``ValueError`` saying what is wrong.
    """
    parts = _DECODER.decode(raw)
    own = {name: msgspec.json.decode(value) for name, value in parts.items() if name in _OWN}
    line = msgspec.convert(own, _Line)
    if (line.prompt is None) == (line.messages is None):
        raise ValueError('needs either "prompt" or "messages"')
    fields = {name: msgspec.json.decode(value) for name, value in parts.items() if name not in _OWN}
    unknown = sorted(fields.keys() - set(SamplingParams.__struct_fields__))
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}: known are {', '.join(_OWN)} and the sampling fields")
    if fields.get("structured_outputs") is not None and fields.get("grammar") is None:
        fields["grammar"] = structured_outputs_of(fields.pop("structured_outputs")).as_grammar()
    msgspec.convert({**defaults, **fields}, SamplingParams, str_keys=True)
    if "grammar" in fields:
        fields["grammar"] = msgspec.convert(fields["grammar"], Grammar | None)
    if "logit_bias" in fields:
        fields["logit_bias"] = msgspec.convert(fields["logit_bias"], dict[int, float] | None, str_keys=True)
    terms = Terms(service=class_named(line.service_class), priority=line.priority)
    return Job(prompt=line.prompt, messages=line.messages, fields=fields, key=line.id, terms=terms)


def read_jobs(lines: Iterable[bytes], name: str, defaults: dict[str, Any]) -> list[Job]:
    """The jobs of a JSONL file; blank lines are skipped.

    Raises `ConfigError` that lists the bad lines by number: nothing is computed for a file that is half right.
    """
    jobs: list[Job] = []
    bad: list[str] = []
    for number, raw in enumerate(lines, start=1):
        if number == 1:
            raw = raw.removeprefix(codecs.BOM_UTF8)  # some editors write one
        if not raw.strip():
            continue
        try:
            jobs.append(parse_line(raw, defaults))
        except (ValueError, InvalidRequest, RecursionError) as error:
            bad.append(f"  line {number}: {error}")
    if bad:
        rest = [f"  and {len(bad) - MAX_SHOWN} more"] if len(bad) > MAX_SHOWN else []
        count = "1 bad line" if len(bad) == 1 else f"{len(bad)} bad lines"
        raise ConfigError("\n".join([f"{name}: {count}, nothing was computed", *bad[:MAX_SHOWN], *rest]))
    if not jobs:
        raise ConfigError(f'{name} holds no prompt: write one JSON object a line, such as {{"prompt": "Hello"}}')
    return jobs


def read_file(path: Path, defaults: dict[str, Any]) -> list[Job]:
    """`read_jobs` of a file; raises `ConfigError` when it cannot be read."""
    try:
        with path.open("rb") as file:
            return read_jobs(file, str(path), defaults)
    except OSError as error:
        raise ConfigError(f"cannot read --input {path}: {error.strerror}") from None
