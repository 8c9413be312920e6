"""Published request traces: Mooncake's JSON lines and Azure's CSV, told apart by their first line.

A Mooncake line may name a service class besides: ``"class": "p0"``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import msgspec

from firsttoken.core.clock import NS_PER_MS
from firsttoken.core.errors import ConfigError
from firsttoken.core.service import ServiceClass
from firsttoken.simulate.workload import MAX_BLOCK_ID, TRACE_BLOCK_TOKENS, Job

MAX_LINE_BYTES = 1 << 20
MAX_REQUESTS = 1_000_000
MAX_TOKENS = 1 << 22  # of a prompt, and of an answer
MAX_MS = 10**12  # some 30 years
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"

Tokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
BlockId = Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_ID)]


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=MAX_MS)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[BlockId]
    service: Literal["p0", "p1", "p2"] = msgspec.field(default="p2", name="class")


class _Damaged(Exception):
    """A line that is not a request, and why."""


def read_trace(path: Path) -> list[Job]:
    """The requests of a trace in order of arrival, the first of them at 0.

    Raises `ConfigError`, with the line's number, for a line that is not a request, and for a file that is no trace or
    too large; `OSError` for one that cannot be read.
    """
    with path.open("rb") as file:
        lines = _lines(file, path)
        number, first = next(lines, (1, ""))
        if first.startswith("{"):
            jobs = _parse_all(path, _chain(number, first, lines), _Mooncake())
        elif first.lstrip("\ufeff") == AZURE_HEADER:
            jobs = _parse_all(path, lines, _Azure())
        else:
            raise ConfigError(
                f"{path} is no trace that is known: the first line is neither a JSON object (Mooncake) nor "
                f"{AZURE_HEADER!r} (Azure)"
            )
    if not jobs:
        raise ConfigError(f"{path} has no requests")
    jobs.sort(key=lambda job: job.at_ns)
    began = jobs[0].at_ns
    return [replace(job, at_ns=job.at_ns - began) for job in jobs]


class _Mooncake:
    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_MooncakeLine)

    def job(self, line: str) -> Job:
        try:
            found = self._decoder.decode(line)
        except msgspec.DecodeError as error:  # of which `ValidationError` is one
            raise _Damaged(str(error)) from None
        blocks = -(-found.input_length // TRACE_BLOCK_TOKENS)
        if len(found.hash_ids) != blocks:
            raise _Damaged(
                f"{found.input_length} tokens are {blocks} blocks of {TRACE_BLOCK_TOKENS}, but there are "
                f"{len(found.hash_ids)} hash_ids"
            )
        at_ns = round(found.timestamp * NS_PER_MS)
        service = ServiceClass[found.service.upper()]
        return Job(at_ns, found.input_length, found.output_length, tuple(found.hash_ids), service)


class _Azure:
    def __init__(self) -> None:
        self._began: datetime | None = None

    def job(self, line: str) -> Job:
        cells = line.split(",")
        if len(cells) != 3:
            raise _Damaged(f"{len(cells)} cells instead of 3")
        try:
            at = datetime.fromisoformat(cells[0])
            since = at - (self._began or at)
        except (ValueError, TypeError):  # `TypeError`: only one of the two times has a zone
            raise _Damaged(f"{cells[0]!r:.80} is not a time like the others") from None
        self._began = self._began or at
        at_ns = since // timedelta(microseconds=1) * 1000
        return Job(at_ns, _tokens("ContextTokens", cells[1]), _tokens("GeneratedTokens", cells[2]))


def _tokens(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= MAX_TOKENS):
        raise _Damaged(f"{name} is {text!r:.80}, not a number from 1 to {MAX_TOKENS}")
    return int(text)


def _parse_all(path: Path, lines: Iterator[tuple[int, str]], parser: _Mooncake | _Azure) -> list[Job]:
    jobs: list[Job] = []
    for number, line in lines:
        try:
            jobs.append(parser.job(line))
        except _Damaged as damage:
            raise ConfigError(f"{path}, line {number}: {damage}") from None
        if len(jobs) > MAX_REQUESTS:
            raise ConfigError(f"{path} has more than {MAX_REQUESTS} requests")
    return jobs


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers. Never reads more than `MAX_LINE_BYTES` for one."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            raise ConfigError(f"{path}, line {number}: more than {MAX_LINE_BYTES} bytes")
        try:
            line = raw.decode().strip()
        except UnicodeDecodeError:
            raise ConfigError(f"{path}, line {number}: not UTF-8") from None
        if line:
            yield number, line


def _chain(number: int, first: str, rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield number, first
    yield from rest
