"""The file of a flight recorder: JSON lines, a head first and an end last. No prompt, answer, key or name of a caller.

Times are ns of the clock of the machine that wrote it (`core.clock`); the head ties that to the calendar.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from firsttoken.core.clock import now_ns
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.errors import ConfigError
from firsttoken.core.service import Targets
from firsttoken.core.step_record import StepRecord
from firsttoken.transport.messages import EngineInfo, EngineStats
from firsttoken.version import __version__

FORMAT = "firsttoken-flight"
VERSION = 1
KEPT_FILES = 8
# What is written for so long is not written any more.
ABANDONED_S = 3600.0
# Requests, and steps, of a line: so few that to write one holds up other threads for a tenth of a millisecond.
LINE_ITEMS = 256
MAX_LINE_BYTES = 64 << 20

Outcome = Literal["running", "finished", "aborted", "refused", "expired", "failed"]
# A recorder keeps a fifth of these at most: a file with more is none, and would fill the memory.
MAX_REQUESTS = 1 << 18
MAX_STEPS = 1 << 21
# What a recording may say of its engine. The simulator makes a list of each.
_MOST = {"max_num_seqs": 1 << 16, "max_model_len": 1 << 24, "kv_blocks": 1 << 24}

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]
MostTokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 22)]
Ns = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class FlightRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of the engine. ``at_ns`` is when it was sent there; ``started_ns``, ``first_ns``, ``ended_ns`` are
    from then on: when it was first scheduled, and when its first token and its end were known to the front end, 0 for
    never. With ``max_tokens`` 0 it was to generate nothing. ``gaps_us`` lie between its tokens as they came. ``tenant``
    numbers who shares the class. Prompts are alike as far as their ``pieces`` are, of the head's ``piece_tokens``
    tokens each, the last one perhaps shorter.
    """

    id: int
    at_ns: Ns
    prompt_tokens: Tokens
    max_tokens: MostTokens
    outcome: Outcome = "running"
    service: Annotated[int, msgspec.Meta(ge=0, le=2)] = 2
    tenant: Count = 0
    priority: int = 0
    deadline_ms: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    cached_tokens: Count = 0
    output_tokens: Count = 0
    preemptions: Count = 0
    started_ns: Ns = 0
    first_ns: Ns = 0
    ended_ns: Ns = 0
    pieces: list[Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]] = []
    gaps_us: list[Count] = []


class FlightSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Of the engine's options those that decide what is computed when, as they were given. ``targets`` without keys."""

    in_flight: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    prefix_caching: bool = True
    kv_eviction: str = "default"
    kv_host_memory: int = 0
    prefill_tokens: Tokens | None = None
    mixed_prefill_tokens: Tokens | None = None
    batch_window: str = "0"
    targets: Targets = Targets()

    @classmethod
    def of(cls, args: EngineArgs) -> FlightSettings:
        given = {name: getattr(args, name) for name in cls.__struct_fields__}
        given["targets"] = msgspec.structs.replace(args.targets, keys={})
        return cls(**given)


class FlightEvent(msgspec.Struct, frozen=True):
    """Something that happened at ``ns``."""

    ns: int
    kind: str
    text: str = ""


class FlightHead(msgspec.Struct, frozen=True, kw_only=True):
    """The first line. ``info`` is None when the engine had not said yet what it is."""

    format: str = FORMAT
    version: int = VERSION
    firsttoken: str = __version__
    reason: str
    source: Literal["front end", "engine"] = "front end"
    pid: int
    written_ns: Ns
    written_unix_ns: Ns
    piece_tokens: Tokens
    info: EngineInfo | None = None
    settings: FlightSettings = FlightSettings()
    step_fields: tuple[str, ...] = StepRecord.__struct_fields__

    @classmethod
    def now(
        cls,
        reason: str,
        piece_tokens: int,
        info: EngineInfo | None,
        settings: FlightSettings,
        source: Literal["front end", "engine"] = "front end",
    ) -> FlightHead:
        return cls(
            reason=reason,
            source=source,
            pid=os.getpid(),
            written_ns=now_ns(),
            written_unix_ns=time.time_ns(),
            piece_tokens=piece_tokens,
            info=info,
            settings=settings,
        )


class _End(msgspec.Struct, frozen=True):
    requests: int
    steps: int


class _Line(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    steps: list[StepRecord] = []
    requests: list[FlightRequest] = []
    stats: list[EngineStats] = []
    events: list[FlightEvent] = []
    end: _End | None = None


class _Version(msgspec.Struct):
    format: str
    version: int


@dataclass(frozen=True)
class Flight:
    """What a file holds: all in the order of time, requests in the order in which they came. ``missing`` says what is,
    of one that was cut short."""

    head: FlightHead
    requests: list[FlightRequest] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    stats: list[EngineStats] = field(default_factory=list)
    events: list[FlightEvent] = field(default_factory=list)
    missing: str = ""


# ---------------------------------------------------------------- writing


def write_flight(
    folder: Path,
    head: FlightHead,
    *,
    steps: Iterable[Sequence[StepRecord]] = (),
    requests: Iterable[FlightRequest] = (),
    stats: Sequence[EngineStats] = (),
    events: Sequence[FlightEvent] = (),
) -> Path:
    """Write a file of its own in ``folder``, which is made, and leave it and the newest others there, `KEPT_FILES` in
    all. Raises `OSError`.

    Other threads are let through between the lines.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = _free_name(folder, head)
    partial = path.with_suffix(".part")
    encode = msgspec.json.Encoder().encode
    num_requests = num_steps = 0
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:

            def put(line: _Line | FlightHead) -> None:
                file.write(encode(line) + b"\n")
                time.sleep(0)

            put(head)
            put(_Line(stats=list(stats), events=list(events)))
            for group in _grouped(requests):
                num_requests += len(group)
                put(_Line(requests=group))
            for records in steps:
                num_steps += len(records)
                put(_Line(steps=list(records)))
            put(_Line(end=_End(num_requests, num_steps)))
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    _keep_newest(folder, path)
    return path


def _free_name(folder: Path, head: FlightHead) -> Path:
    """Of the moment of writing, or of the first ms after it that is not taken."""
    ms = head.written_unix_ns // 1_000_000
    while True:
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(ms // 1000))
        path = folder / f"flight-{stamp}.{ms % 1000:03d}Z-{head.pid}.jsonl"
        if not path.exists():
            return path
        ms += 1


def _grouped(requests: Iterable[FlightRequest]) -> Iterator[list[FlightRequest]]:
    group: list[FlightRequest] = []
    for request in requests:
        group.append(request)
        if len(group) == LINE_ITEMS:
            yield group
            group = []
    if group:
        yield group


def _keep_newest(folder: Path, written: Path) -> None:
    """``written`` stays whatever its name says: the calendar may have been set back since the others were written."""
    files = sorted(set(folder.glob("flight-*.jsonl")) - {written})  # the name begins with the time
    old = files[: 1 - KEPT_FILES] + [part for part in folder.glob("flight-*.part") if _abandoned(part)]
    for path in old:
        with contextlib.suppress(OSError):  # another process may have been here
            path.unlink()


def _abandoned(partial: Path) -> bool:
    """Whoever wrote it was killed meanwhile."""
    try:
        return time.time() - partial.stat().st_mtime > ABANDONED_S
    except OSError:
        return False


# ---------------------------------------------------------------- reading


def read_flight(path: Path, *, partial: bool = False) -> Flight:
    """Raises `ConfigError`, with what is wrong, for a file that is none, of another version, damaged or cut short;
    `OSError` for one that cannot be read. With ``partial``, the lines that are whole of a file that was cut short."""
    lines = msgspec.json.Decoder(_Line)
    end = None
    with path.open("rb") as file:
        flight = Flight(_read_head(path, file.readline(MAX_LINE_BYTES)))
        number = 1
        while raw := file.readline(MAX_LINE_BYTES):
            number += 1
            if end is not None:
                raise ConfigError(f"{path}, line {number}: something follows the end of the recording")
            try:
                line = lines.decode(raw)
            except (msgspec.DecodeError, RecursionError) as error:
                if partial and not raw.endswith(b"\n"):
                    break
                what = f"{path}, line {number}: the file is damaged"
                raise ConfigError(f"{what} or cut short ({error})") from None
            if any(one.output_tokens > len(one.gaps_us) + 1 for one in line.requests):
                raise ConfigError(f"{path}, line {number}: the file is damaged (a request has more tokens than gaps)")
            flight.requests.extend(line.requests)
            flight.steps.extend(line.steps)
            flight.stats.extend(line.stats)
            flight.events.extend(line.events)
            end = line.end
            if len(flight.requests) > MAX_REQUESTS or len(flight.steps) > MAX_STEPS:
                raise ConfigError(
                    f"{path}, line {number}: more than {MAX_REQUESTS:,} requests or {MAX_STEPS:,} steps, which no "
                    "recorder keeps"
                )
    if end is None:
        missing = f"is cut short: it has {number} lines and no end"
        if not partial:
            raise ConfigError(f"{path} {missing}; take another dump")
        flight = replace(flight, missing=missing)
    elif end != _End(len(flight.requests), len(flight.steps)):
        raise ConfigError(
            f"{path} is damaged: it should have {end.requests} requests and {end.steps} steps, and has "
            f"{len(flight.requests)} and {len(flight.steps)}"
        )
    flight.requests.sort(key=lambda request: request.at_ns)
    return flight


def _read_head(path: Path, raw: bytes) -> FlightHead:
    try:
        found = msgspec.json.decode(raw, type=_Version)
    except (msgspec.DecodeError, RecursionError):
        found = _Version("", 0)
    if found.format != FORMAT:
        raise ConfigError(
            f"{path} is no recording of a flight recorder: its first line does not say so; a server writes one on "
            "SIGUSR1 and when its engine dies (--flight-dir says where)"
        )
    if found.version != VERSION:
        raise ConfigError(
            f"{path} has version {found.version} of the format, and this firsttoken ({__version__}) reads version "
            f"{VERSION}: use the firsttoken that wrote it"
        )
    try:
        head = msgspec.json.decode(raw, type=FlightHead)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}, line 1: the file is damaged ({error})") from None
    for name, most in _MOST.items():
        if head.info is not None and not 1 <= getattr(head.info, name) <= most:
            raise ConfigError(
                f"{path}, line 1: the file is damaged (the engine's {name} is {getattr(head.info, name)}, "
                f"and can be from 1 to {most})"
            )
    return head
