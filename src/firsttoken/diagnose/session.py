"""What is asked of a server, in which order: a check, requests at a pace, connections kept, sweeps."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from firsttoken.diagnose.dialect import CHAT, COMPLETIONS, Dialect
from firsttoken.diagnose.errors import ProbeFailed
from firsttoken.diagnose.loop_lag import LoopLag, loop_lag, mean_between
from firsttoken.diagnose.probe import Ask, Probe
from firsttoken.diagnose.prompts import words
from firsttoken.diagnose.sample import Sample, Tls

Say = Callable[[str], None]
_NO_ROUTE = 404
_REFUSED = (400, _NO_ROUTE, 422)


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """``requests`` at a pace, one at a time, ``pause_ms`` apart on the average, each of about ``prompt_tokens`` that
    begin with ``shared`` (a share) of words that all have in common, as a system prompt is. ``reuse`` keeps one
    connection for all of them. Sweeps of nothing are left out."""

    model: str | None = None
    requests: int = 20
    pause_ms: float = 50.0
    prompt_tokens: int = 128
    shared: float = 0.5
    max_tokens: int = 32
    reuse: bool = False
    sweep_prompts: tuple[int, ...] = (16, 256, 1024)
    sweep_concurrency: tuple[int, ...] = (1, 2, 4, 8)
    repeat: int = 4
    sweep_tokens: int = 8
    seed: int = 0


@dataclass(frozen=True)
class KeepAlive:
    """A second request on one connection, and a second connection that tried to resume the first one's TLS session.
    ``works`` False: the server closes; ``why`` says how. ``resumed_ms`` is that handshake's time."""

    works: bool
    why: str = ""
    second: Sample | None = None
    resumed: Tls | None = None
    resumed_ms: float | None = None


@dataclass(frozen=True)
class Runs:
    """All that was measured. ``lengths`` are the samples of the sweep of prompts (one at a time) by their length,
    ``crowds`` those of the sweep of concurrency by how many were sent at once. ``shared_tokens`` of each paced prompt
    are the same in all. ``loop_lag_ms`` is how late the server's event loop woke up on the average meanwhile, where its
    metrics say so (firsttoken's do).
    """

    model: str
    paced: tuple[Sample, ...]
    keep_alive: KeepAlive | None = None
    lengths: dict[int, tuple[Sample, ...]] = field(default_factory=dict)
    crowds: dict[int, tuple[Sample, ...]] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    shared_tokens: int = 0
    loop_lag_ms: float | None = None


class Session:
    """Asks one server. Every prompt but the paced ones' common beginning is new to it."""

    def __init__(self, probe: Probe, config: SessionConfig, say: Say = lambda text: None) -> None:
        self._probe = probe
        self._config = config
        self._say = say
        self._rng = random.Random(config.seed)
        self._nonce = f"{time.time_ns():x}"
        self._sent = 0
        self._model = config.model or ""
        self._notes: list[str] = []
        self._failures: list[str] = []

    def run(self) -> Runs:
        """Raises `ProbeFailed` where the server cannot be measured; later failures are counted in the result."""
        config = self._config
        self._model = config.model or self._first_model()
        self._say("a first request")
        self._settle_dialect()
        lag = self._loop_lag()
        keep_alive = self._keep_alive()
        paced = self._paced()
        lengths = self._lengths()
        crowds = {count: self._crowd(count) for count in config.sweep_concurrency}
        late = self._loop_lag()
        return Runs(
            model=self._model,
            paced=tuple(paced),
            keep_alive=keep_alive,
            lengths=lengths,
            crowds={count: samples for count, samples in crowds.items() if samples},
            failures=tuple(self._failures),
            notes=tuple(self._notes),
            shared_tokens=int(config.prompt_tokens * config.shared),
            loop_lag_ms=mean_between(lag, late),
        )

    def _first_model(self) -> str:
        status, body = self._probe.get("/v1/models")
        if status >= 400:
            raise self._probe.refusal("/v1/models", status, body)
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            where = f"{self._probe.endpoint}/v1/models"
            text = f"{where} (status {status}) lists no model: is this the API's address? Or name one with --model"
            raise ProbeFailed("ttfb", text, status=status) from None

    def _loop_lag(self) -> LoopLag | None:
        try:
            status, body = self._probe.get("/metrics")
        except ProbeFailed:
            return None
        return loop_lag(body) if status == 200 else None

    def _settle_dialect(self) -> None:
        """The first request, also what warms the server up and puts the common beginning into its cache."""
        refusal = self._richest(CHAT)
        if refusal is None:
            return
        # A model may have no chat template, a server no such route.
        if self._richest(COMPLETIONS) is not None:
            raise refusal
        self._notes.append(f"asked at {self._probe.dialect.path}, since chat is refused: {refusal}")

    def _richest(self, dialects: Sequence[Dialect]) -> ProbeFailed | None:
        """Ask in the first of ``dialects`` that is not refused from now on; the last refusal where all are."""
        refusal: ProbeFailed | None = None
        for dialect in dialects:
            self._probe = replace(self._probe, dialect=dialect)
            try:
                self._probe.once(self._paced_ask())
            except ProbeFailed as error:
                if error.status not in _REFUSED:
                    raise
                refusal = error
            else:
                return None
            if refusal.status == _NO_ROUTE:
                break
        return refusal

    def _keep_alive(self) -> KeepAlive:
        self._say("a second request on one connection")
        probe = self._probe
        connection = probe.open()
        try:
            first = probe.ask(connection, self._paced_ask())
            session = connection.session
            if not first.keep_alive:
                return KeepAlive(False, "the server ends the connection with its answer")
            try:
                second = probe.ask(connection, self._paced_ask())
            except ProbeFailed as error:
                return KeepAlive(False, f"a second request on the connection failed: {error}")
        finally:
            connection.close()
        if session is None:
            return KeepAlive(True, second=second)
        again = probe.open(session)
        again.close()
        return KeepAlive(True, "", second, again.tls, (again.secured_ns - again.connected_ns) / 1e6)

    def _paced(self) -> list[Sample]:
        config, probe = self._config, self._probe
        samples: list[Sample] = []
        kept = probe.open() if config.reuse else None
        try:
            for number in range(config.requests):
                self._say(f"request {number + 1} of {config.requests}")
                # Not in step with whatever ticks at the server.
                time.sleep(config.pause_ms / 1e3 * self._rng.uniform(0.5, 1.5))
                try:
                    ask = self._paced_ask()
                    samples.append(probe.once(ask) if kept is None else probe.ask(kept, ask))
                except ProbeFailed as error:
                    self._failures.append(str(error))
                    if kept is not None:
                        kept.close()
                        kept = probe.open()
                    continue
                if kept is not None and not samples[-1].keep_alive:
                    kept.close()
                    kept = probe.open()
        finally:
            if kept is not None:
                kept.close()
        if not samples:
            raise ProbeFailed(
                "ttfb", f"none of {config.requests} requests was answered; the last: {self._failures[-1]}"
            )
        return samples

    def _lengths(self) -> dict[int, tuple[Sample, ...]]:
        config = self._config
        found: dict[int, tuple[Sample, ...]] = {}
        for tokens in sorted(config.sweep_prompts):
            self._say(f"prompts of {tokens} tokens")
            try:
                found[tokens] = tuple(
                    self._probe.once(self._ask(words(tokens, self._seed()), config.sweep_tokens))
                    for _ in range(config.repeat)
                )
            except ProbeFailed as error:
                self._notes.append(f"prompts of {tokens} tokens were left out of the sweep: {error}")
                break
        return found

    def _crowd(self, count: int) -> tuple[Sample, ...]:
        """``count`` short prompts at once, twice; connections are open before."""
        self._say(f"{count} at once")
        samples: list[Sample] = []
        try:
            for _ in range(2):
                samples += self._at_once(count)
        except ProbeFailed as error:
            self._notes.append(f"{count} at once were left out of the sweep: {error}")
            return ()
        return tuple(samples)

    def _at_once(self, count: int) -> list[Sample]:
        asks = [self._ask(words(16, self._seed()), self._config.sweep_tokens) for _ in range(count)]
        connections = [self._probe.open() for _ in range(count)]
        barrier = threading.Barrier(count)
        try:
            with ThreadPoolExecutor(count) as pool:
                jobs = [
                    pool.submit(self._probe.ask, connection, ask, barrier.wait)
                    for connection, ask in zip(connections, asks, strict=True)
                ]
                return [job.result() for job in jobs]
        finally:
            for connection in connections:
                connection.close()

    def _paced_ask(self) -> Ask:
        """The common part is the same whatever run asks; the rest is not."""
        config = self._config
        shared = int(config.prompt_tokens * config.shared)
        rest = words(config.prompt_tokens - shared, self._seed())
        return self._ask(f"{words(shared, f'shared/{self._nonce}')} {rest}", config.max_tokens)

    def _ask(self, prompt: str, max_tokens: int) -> Ask:
        self._sent += 1
        return Ask(self._model, prompt, max_tokens, f"diagnose-{self._nonce}-{self._sent}")

    def _seed(self) -> str:
        return f"{self._nonce}/{self._sent}/{self._rng.random()}"
