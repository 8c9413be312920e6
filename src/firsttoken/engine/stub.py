"""A scripted engine: the real protocol, the caller's tokens, no model. For tests and benchmarks of all that lies
between a caller and an engine.

A *script* says which tokens a request gets. The stub emits one token a step for every running request, all in one
`StepOutputs`, and honours ``max_tokens``, ``min_tokens``, ``stop_ids``, ``max_num_seqs`` (the rest waits, best service
class first, else in order), ``deadline_ns``, aborts, and the number of KV blocks (a request that can never fit is
refused). When a script has no more to say, the
request ends as a model would end it: with the first of its ``stop_ids``; if it has none, with "length".
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from firsttoken.core.clock import now_ns
from firsttoken.core.errors import DeadlineExceeded
from firsttoken.core.plan import TokenLogprobs
from firsttoken.core.request import EngineRequest, Request, Status
from firsttoken.core.step_record import MAX_NAMED_PROMPTS, StepRecord
from firsttoken.core.timeline import Mark
from firsttoken.core.waits import Wait
from firsttoken.engine.stub_gauges import StubGauges, class_stats
from firsttoken.engine.stub_prompts import STUB_VECTOR, pooled, prompt_logprobs
from firsttoken.transport.channel import ChannelClosed, ClientEnd, EngineEnd
from firsttoken.transport.inprocess import in_process_channel
from firsttoken.transport.messages import (
    Abort,
    EngineInfo,
    EngineStats,
    Failed,
    Ready,
    Refused,
    RequestDelta,
    Shutdown,
    Spent,
    StepOutputs,
    Submit,
    ToEngine,
)
from firsttoken.transport.process_end import end_words
from firsttoken.transport.socket_channel import SocketClientEnd, SocketEngineEnd


@dataclass(frozen=True)
class Fault:
    """In a script, in place of a token: the request fails there with ``code``, or (``fatal``) the whole engine does.

    A fatal fault sends `Failed` first, unless ``silent``: then the channel just closes, as when a process is killed.
    """

    message: str = "scripted fault"
    code: str | None = None
    fatal: bool = False
    silent: bool = False


Script = Callable[[EngineRequest], Sequence[int | Fault]]


def echo(request: EngineRequest) -> list[int]:
    """A script for `StubProcess`: the prompt over and over, up to ``max_tokens``."""
    prompt = array("I", request.prompt).tolist()
    return [prompt[position % len(prompt)] for position in range(request.max_tokens)]


class StubConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``step_s`` seconds a step takes (0: as fast as it goes), ``tokens_per_step`` tokens of a request in one delta,
    ``start_s`` seconds until the engine is ready, ``heartbeat_s`` between messages when idle, ``freeze_after`` steps
    after which no step ends any more (the loop still turns), ``fail_start`` a reason not to start at all. Lengths
    in tokens, KV in blocks of ``block_tokens``.
    """

    step_s: float = 0.0
    tokens_per_step: int = 1
    start_s: float = 0.0
    heartbeat_s: float = 0.1
    freeze_after: int | None = None
    fail_start: str | None = None
    model: str = "stub"
    vocab_size: int = 1024
    max_model_len: int = 4096
    max_num_seqs: int = 64
    kv_blocks: int = 65536
    block_tokens: int = 16
    cached_tokens: int = 0  # reported for every request, up to its prompt less one token


class StubEngine:
    """The handle of a running stub, as `firsttoken.engine.launch` gives one of a real engine.

    Runs ``script`` on a thread of this process. The same in a child process: `StubProcess`.
    """

    def __init__(self, script: Script, config: StubConfig | None = None, **options: object) -> None:
        self.config = _with_options(config, options)
        engine_end, client = in_process_channel()
        self.client: ClientEnd = client
        self.pid: int | None = None
        self.loop = StubLoop(engine_end, script, self.config)
        self._thread = threading.Thread(target=self.loop.run, name="firsttoken-stub", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def how_it_ended(self) -> str:
        return ""

    def kill(self, message: str | None = None) -> None:
        """End the engine now: with a last word (`Failed`), or without."""
        self.loop.killed_by = Fault(message or "", fatal=True, silent=message is None)

    def stop(self, timeout_s: float = 5.0) -> None:
        with contextlib.suppress(ChannelClosed):  # it may have gone already
            self.client.send(Shutdown())
        self._thread.join(timeout_s)
        self.client.close()


class StubProcess:
    """The stub in a child process, over the socket channel. ``script`` is "module:function", importable there."""

    def __init__(self, script: str, config: StubConfig | None = None, **options: object) -> None:
        self.config = _with_options(config, options)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "firsttoken.engine.stub", "--fd", str(theirs.fileno()), "--script", script]
        command += ["--config", msgspec.json.encode(self.config).decode()]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])  # noqa: S603  # our own interpreter
        theirs.close()
        self.pid: int | None = self.process.pid
        self.client: ClientEnd = SocketClientEnd(ours)

    def alive(self) -> bool:
        return self.process.poll() is None

    def how_it_ended(self) -> str:
        return end_words(self.process.poll())

    def kill(self) -> None:
        """SIGKILL: no last word."""
        self.process.kill()

    def stop(self, timeout_s: float = 5.0) -> None:
        with contextlib.suppress(ChannelClosed, OSError):  # it may have gone already
            self.client.send(Shutdown())
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.client.close()


class _Stream:
    """One request in the stub: what is left of its script."""

    def __init__(self, request: Request, script: Sequence[int | Fault], config: StubConfig) -> None:
        self.request = request
        self.script = deque(script)
        self.told_stamps = len(request.timeline.stamps()) - 1  # the front end's own; ARRIVED is the first to tell
        self.blocks = -(-(request.num_prompt + request.max_tokens) // config.block_tokens)

    def next(self) -> int | Fault | None:
        """The next token; None when nothing is left and no end token is known."""
        stop_ids = self.request.stop_ids
        while self.script:
            item = self.script.popleft()
            early = self.request.num_output < self.request.params.min_tokens
            if isinstance(item, int) and item in stop_ids and early:
                continue  # a model's end tokens are masked until min_tokens
            return item
        return min(stop_ids) if stop_ids else None


_TOTALS = ("steps", "prompt_tokens", "cached_prompt_tokens", "output_tokens", "finished", "aborted", "failed")


class StubLoop:
    """The stub's step loop. One thread calls `run`."""

    def __init__(self, end: EngineEnd, script: Script, config: StubConfig) -> None:
        self._end = end
        self._script = script
        self._config = config
        self._waiting: deque[_Stream] = deque()
        self._running: dict[int, _Stream] = {}
        self._deltas: list[RequestDelta] = []
        self._stopping = False
        self._told_ns = 0
        self._totals = dict.fromkeys(_TOTALS, 0)
        self._last_step_ns = 0
        self._records: list[StepRecord] = []
        self._gauges = StubGauges()
        self.killed_by: Fault | None = None

    def run(self) -> None:
        try:
            if self._start():
                while not self._stopping:
                    self._turn()
        except ChannelClosed:
            pass  # the front end is gone: nobody is left to serve
        finally:
            self._end.close()

    def _start(self) -> bool:
        config = self._config
        time.sleep(config.start_s)
        if config.fail_start is not None:
            self._end.send(Failed(config.fail_start))
            return False
        info = EngineInfo(
            model=config.model,
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            hidden_size=STUB_VECTOR,
            max_num_seqs=config.max_num_seqs,
            kv_blocks=config.kv_blocks,
            block_tokens=config.block_tokens,
            bytes_per_block=1024,
            device="stub",
            dtype="float32",
            quantization="none",
            kv_dtype="float32",
        )
        self._end.send(Ready(info))
        return True

    def _turn(self) -> None:
        busy = bool(self._running or self._waiting)
        for message in self._end.receive(0 if busy else self._config.heartbeat_s):
            self._obey(message)
        if self.killed_by is not None:
            self._die(self.killed_by)
            return
        frozen = self._config.freeze_after is not None and self._totals["steps"] >= self._config.freeze_after
        if frozen:
            time.sleep(0.01)
        else:
            self._expire()
            self._admit()
            if self._running:
                self._step()
        self._emit()

    # ------------------------------------------------------------------ messages

    def _obey(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            for wire in message.requests:
                self._add(wire)
        elif isinstance(message, Abort):
            for request_id in message.ids:
                self._abort(request_id)
        else:
            self._stopping = True

    def _add(self, wire: EngineRequest) -> None:
        request = Request(wire)
        try:
            script = self._script(wire)
        except Exception as error:
            script = [Fault(f"{type(error).__name__}: {error}")]
        stream = _Stream(request, script, self._config)
        if stream.blocks > self._config.kv_blocks:
            why = f"the request needs {stream.blocks} KV blocks and the engine has {self._config.kv_blocks}"
            self._end.send(Refused(wire.id, why, "max_tokens", "kv_capacity_exceeded"))
            return
        request.num_cached = min(self._config.cached_tokens, request.num_prompt - 1)
        self._waiting.append(stream)
        if len(self._waiting) > 1:
            self._waiting = deque(sorted(self._waiting, key=lambda one: one.request.service))

    def _abort(self, request_id: int) -> None:
        stream = self._running.pop(request_id, None)
        if stream is None:
            stream = next((one for one in self._waiting if one.request.request_id == request_id), None)
            if stream is None:
                return
            self._waiting.remove(stream)
        stream.request.finish("abort")
        self._totals["aborted"] += 1
        self._tell(stream, [])

    # ------------------------------------------------------------------ steps

    def _expire(self) -> None:
        now = now_ns()
        for stream in [one for one in self._waiting if 0 < one.request.deadline_ns <= now]:
            self._waiting.remove(stream)
            stream.request.finish("error")
            self._totals["failed"] += 1
            self._tell(stream, [], Fault("deadline passed before the request could start", DeadlineExceeded.code))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._config.max_num_seqs:
            used = sum(stream.blocks for stream in self._running.values())
            if used + self._waiting[0].blocks > self._config.kv_blocks:
                return
            stream = self._waiting.popleft()
            stream.request.status = Status.RUNNING
            stream.request.timeline.stamp(Mark.SCHEDULED)
            self._running[stream.request.request_id] = stream
            self._totals["prompt_tokens"] += stream.request.num_prompt
            self._totals["cached_prompt_tokens"] += stream.request.num_cached
            self._gauges.prompt(stream.request)

    def _step(self) -> None:
        began = now_ns()
        if self._config.step_s:
            time.sleep(self._config.step_s)
        self._totals["steps"] += 1
        self._last_step_ns = now_ns()
        self._records.append(self._step_record(began, self._last_step_ns))
        for stream in list(self._running.values()):
            self._advance(stream)

    def _step_record(self, began: int, ended: int) -> StepRecord:
        """As if all of the prompts that are new had been computed, and a row of each other request."""
        requests = [stream.request for stream in self._running.values()]
        fresh = [request for request in requests if not request.num_output]
        return StepRecord(
            step_id=self._totals["steps"],
            planned_ns=began,
            submitted_ns=began,
            started_ns=began,
            ended_ns=ended,
            harvested_ns=ended,
            decode_rows=len(requests) - len(fresh),
            prefill_tokens=sum(request.num_prompt - request.num_cached for request in fresh),
            context_tokens=sum(request.num_tokens for request in requests),
            forward_ns=ended - began,
            prefill_requests=tuple([request.request_id for request in fresh[:MAX_NAMED_PROMPTS]]),
        )

    def _advance(self, stream: _Stream) -> None:
        request = stream.request
        tokens: list[int] = []
        fault = None
        if request.prompt_only:
            request.finish("length" if request.pooling is None else "stop")
        while request.finish_reason is None and len(tokens) < self._config.tokens_per_step:
            item = stream.next()
            if isinstance(item, Fault):
                if item.fatal:
                    self.killed_by = item
                    return
                fault = item
                request.finish("error")
            elif item is None:
                request.finish("length")
            else:
                tokens.append(item)
                self._append(request, item)
        if request.finish_reason is not None:
            del self._running[request.request_id]
            self._totals["finished" if fault is None else "failed"] += 1
        self._totals["output_tokens"] += len(tokens)
        self._tell(stream, tokens, fault)

    def _append(self, request: Request, token: int) -> None:
        if not request.num_output:
            request.timeline.stamp(Mark.FIRST_TOKEN)
        request.tokens.append(token)
        if token in request.stop_ids:
            request.finish("stop", token if token in (request.params.stop_token_ids or ()) else None)
        elif request.num_output >= request.max_tokens:
            request.finish("length")

    # ------------------------------------------------------------------ telling

    def _tell(self, stream: _Stream, tokens: list[int], fault: Fault | None = None) -> None:
        request = stream.request
        done = request.finish_reason is not None and fault is None
        first = request.num_output == len(tokens) and (bool(tokens) or done)
        if request.finish_reason is not None:
            # All again, as the engine does: a caller who has left meanwhile is told the last word alone.
            stream.told_stamps = request.num_front_stamps
        stamps = request.timeline.stamps()[stream.told_stamps :]
        stream.told_stamps += len(stamps)
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = [self._logprobs(token, request.params.logprobs) for token in tokens]
        self._deltas.append(
            RequestDelta(
                request.request_id,
                tokens,
                logprobs,
                finish_reason=request.finish_reason,
                stop_reason=request.stop_reason,
                error=None if fault is None else fault.message,
                code=None if fault is None else fault.code,
                cached_tokens=request.num_cached,
                stamps=stamps,
                spent=_spent(request) if stamps else None,
                kept=_kept(request) if request.finish_reason is not None else None,
                prompt_logprobs=prompt_logprobs(request, self._config.vocab_size) if first else None,
                pooled=pooled(request) if done and request.finish_reason != "abort" else None,
            )
        )

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        """The token itself at -0.5, then its successors in the vocabulary, each one less likely by 1."""
        top = [(token + rank) % self._config.vocab_size for rank in range(count)]
        return TokenLogprobs(-0.5, 1, top, [-0.5 - rank for rank in range(count)])

    def _emit(self) -> None:
        now = now_ns()
        if not self._deltas and now - self._told_ns < self._config.heartbeat_s * 1e9:
            return
        self._told_ns = now
        deltas, self._deltas = self._deltas, []
        self._end.send(StepOutputs(deltas, self._stats(now), self._gauges.kv(now), steps=self._take_records()))

    def _stats(self, now: int) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_total=self._config.kv_blocks,
            kv_used=sum(stream.blocks for stream in self._running.values()),
            heartbeat_ns=now,
            last_step_ns=self._last_step_ns,
            classes=class_stats(
                (one.request for one in self._waiting), (one.request for one in self._running.values())
            ),
            step_time_errors={},
            **self._totals,
        )

    def _die(self, fault: Fault) -> None:
        self._stopping = True
        if not fault.silent:
            self._end.send(StepOutputs([], self._stats(now_ns()), steps=self._take_records()))
            self._end.send(Failed(fault.message))

    def _take_records(self) -> list[StepRecord]:
        """Of the steps that were not told yet."""
        records, self._records = self._records, []
        return records


def _spent(request: Request) -> Spent:
    """It waits for nothing but the next step, or for a slot as if for that."""
    queue_ns = [0] * len(Wait)
    arrived, *later = request.timeline.times[request.num_front_stamps :]
    queue_ns[Wait.STEP] = later[0] - arrived
    return Spent(queue_ns, 1, max(request.num_output - 1, 0))


def _kept(request: Request) -> bool | None:
    """The stub has room for every wish."""
    wish = request.retention
    return True if wish is not None and wish.ttl_ns else None


def _with_options(config: StubConfig | None, options: dict[str, object]) -> StubConfig:
    return msgspec.convert({**msgspec.to_builtins(config or StubConfig()), **options}, StubConfig, strict=True)


def _resolve(script: str) -> Script:
    module, _, name = script.partition(":")
    found: Script = getattr(importlib.import_module(module), name)
    return found


def main() -> None:
    """The child process of `StubProcess`."""
    parser = argparse.ArgumentParser(description="scripted engine on a socket handed over by the parent")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--script", required=True, help="module:function")
    parser.add_argument("--config", required=True, help="StubConfig as JSON")
    args = parser.parse_args()
    config = msgspec.json.decode(args.config, type=StubConfig)
    StubLoop(SocketEngineEnd(socket.socket(fileno=args.fd)), _resolve(args.script), config).run()


if __name__ == "__main__":
    main()
