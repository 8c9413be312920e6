"""The batch window: how long a waiting prompt is held back so that others can join its step.

A prompt that is held computes nothing, so a window only pays where the step that it saves is longer than the wait.
`PredictedWindow` asks the model of step times for just that; `AdaptiveWindow` knows no step times and follows
thresholds; `StaticWindow` is the fixed time that other servers are configured with.

Who comes to an empty queue begins a hold, and those behind it join it. When it ends, all of them may start, and nobody
is held again before the queue has been empty: `Hold`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from firsttoken.core.clock import NS_PER_MS, NS_PER_S
from firsttoken.core.duration import milliseconds
from firsttoken.core.errors import ConfigError
from firsttoken.core.request import Request
from firsttoken.core.service import ServiceClass, Targets
from firsttoken.scheduler.step_time import StepLoad, StepTime

NO_WINDOW, ADAPTIVE, PREDICTED = "0", "adaptive", "predicted"
# `AdaptiveWindow`: how many first tokens its P95 is of, how old they may be, and how often the window moves.
RECENT_TOKENS = 128
RECENT_NS = 5 * NS_PER_S
MOVE_NS = 100 * NS_PER_MS
# So long after the last sign of a request, the next one is the first of a burst.
IDLE_NS = NS_PER_S
LATE, EARLY = 1.2, 0.9  # P95 as a share of its target
SHORT, DEEP = 1 / 3, 0.8  # the queue as a share of its limit
SHRINK, GROW = 0.8, 1.5
BUSY_CPU = 0.9
LONGEST_MS = 1000.0
# How much the newest arrival counts in the means of `PredictedWindow`.
NEWEST = 0.1


class BatchWindow(ABC):
    """Decides how long a hold lasts, from what it is told of arrivals and first tokens."""

    def arrived(self, now_ns: int, tokens: int) -> None:  # noqa: B027  # not every window wants to know
        """A request of so many prompt tokens came."""

    def first_token(self, now_ns: int, took_ms: float, waiting: int) -> None:  # noqa: B027  # the same
        """A request got its first token ``took_ms`` after it came; so many wait now."""

    @abstractmethod
    def hold_until_ns(self, now_ns: int, oldest_ns: int, waiting: int, load: StepLoad) -> int:
        """When the ``waiting`` requests, the first of which came at ``oldest_ns``, may start; what is not after
        ``now_ns`` means at once. ``load`` is the step that is computed without them."""


class StaticWindow(BatchWindow):
    """Always ``ms``. Raises `ConfigError` unless it is from 0 to `LONGEST_MS`."""

    def __init__(self, ms: float) -> None:
        if not 0 <= ms <= LONGEST_MS:
            raise ConfigError(f"a batch window must be 0 ms or more and at most {LONGEST_MS:g} ms, got {ms:g} ms")
        self._ns = round(ms * NS_PER_MS)

    def hold_until_ns(self, now_ns: int, oldest_ns: int, waiting: int, load: StepLoad) -> int:
        return oldest_ns + self._ns


class AdaptiveWindow(BatchWindow):
    """A window between ``low_ms`` and ``high_ms`` that moves every 100 ms at most, by the P95 of the first tokens of
    the last 5 s (the last 128 of them) and the queue:

    - times 0.8 when P95 is over 1.2 x ``target_ms`` *and* less than a third of ``queue_limit`` requests wait;
    - times 1.5 when more than 80 % of ``queue_limit`` wait *and* P95 is under 0.9 x ``target_ms``;
    - while ``cpu_share`` (0 to 1, of the engine's work beside the device's) is over 0.9, the host bounds the step rate
      and more requests a step are worth more: the window does not shrink, and grows whenever P95 is under 0.9 x
      ``target_ms``.

    At ``low_ms`` nothing is held. After a second without a sign of a request it is back there, and the first burst is
    answered at once. Raises `ConfigError`.
    """

    def __init__(
        self,
        target_ms: float,
        queue_limit: int,
        *,
        low_ms: float = 1.0,
        high_ms: float = 50.0,
        cpu_share: Callable[[], float] | None = None,
    ) -> None:
        if not 0 < target_ms < float("inf"):
            raise ConfigError(f"an adaptive window needs a target for the first token above 0 ms, got {target_ms!r}")
        if queue_limit < 1:
            raise ConfigError(f"an adaptive window needs a queue limit of 1 or more, got {queue_limit!r}")
        if not 0 < low_ms < high_ms < float("inf"):
            raise ConfigError(f"an adaptive window's bounds must be above 0 and rise, got {low_ms!r} and {high_ms!r}")
        self._target_ms, self._limit = target_ms, queue_limit
        self._low, self._high = low_ms, high_ms
        self._cpu_share = cpu_share or _never_busy
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_TOKENS)
        self._moved_ns = 0
        self._seen_ns: int | None = None
        self._at_once = True
        self.ms = low_ms

    def arrived(self, now_ns: int, tokens: int) -> None:
        self._at_once = self._seen_ns is None or now_ns - self._seen_ns > IDLE_NS
        if self._at_once:
            self.ms = self._low
        self._seen_ns = now_ns

    def first_token(self, now_ns: int, took_ms: float, waiting: int) -> None:
        self._seen_ns = now_ns
        self._recent.append((now_ns, took_ms))
        if now_ns - self._moved_ns >= MOVE_NS:
            self._moved_ns = now_ns
            self.ms = min(max(self.ms * self._factor(now_ns, waiting), self._low), self._high)

    def hold_until_ns(self, now_ns: int, oldest_ns: int, waiting: int, load: StepLoad) -> int:
        if self.ms <= self._low or (self._at_once and not load.decode_rows):
            return now_ns
        return oldest_ns + round(self.ms * NS_PER_MS)

    def _factor(self, now_ns: int, waiting: int) -> float:
        while now_ns - self._recent[0][0] > RECENT_NS:
            self._recent.popleft()
        ordered = sorted(ms for _, ms in self._recent)
        p95 = ordered[(len(ordered) * 19 - 1) // 20]
        late, early = p95 > LATE * self._target_ms, p95 < EARLY * self._target_ms
        busy = self._cpu_share() > BUSY_CPU
        if late and waiting < SHORT * self._limit and not busy:
            return SHRINK
        if early and (waiting > DEEP * self._limit or busy):
            return GROW
        return 1.0


class PredictedWindow(BatchWindow):
    """Holds only while the model of step times says that it pays.

    What one more prompt of mean length saves when it joins is the prompts' time in two steps less their time in one.
    The wait for it is the mean gap between arrivals, paid by each request that waits. A hold goes on as long as the
    saving is more than that, and never longer than the saving itself. Most often that is not at all.
    """

    def __init__(self, step_time: StepTime) -> None:
        self._step_time = step_time
        self._last_ns: int | None = None
        self._gap_ms: float | None = None
        self._tokens: float | None = None

    def arrived(self, now_ns: int, tokens: int) -> None:
        if self._last_ns is not None:
            now_ns = max(now_ns, self._last_ns)  # they are not always told in the order in which they came
            self._gap_ms = _mean(self._gap_ms, (now_ns - self._last_ns) / NS_PER_MS)
        self._last_ns = now_ns
        self._tokens = _mean(self._tokens, tokens)

    def hold_until_ns(self, now_ns: int, oldest_ns: int, waiting: int, load: StepLoad) -> int:
        if self._gap_ms is None or self._tokens is None:
            return now_ns
        saved_ms = self._saved_ms(load, waiting, round(self._tokens))
        if saved_ms <= self._gap_ms * waiting:
            return now_ns
        return oldest_ns + round(saved_ms * NS_PER_MS)

    def _saved_ms(self, load: StepLoad, waiting: int, tokens: int) -> float:
        ms = self._step_time.ms
        first, second, both = (_with_prompts(load, count, tokens) for count in (waiting, 1, waiting + 1))
        # The decode rows are computed in either step, so a second one is no loss to them.
        without = ms(load) if load.decode_rows else 0.0
        return ms(first) + ms(second) - ms(both) - without


def find_window(
    name: str, targets: Targets, *, queue_limit: int, step_time: StepTime, cpu_share: Callable[[], float] | None = None
) -> BatchWindow | None:
    """A new window: a time (``2ms``; a number alone is milliseconds), ``adaptive`` (to the first token's target of the
    best class that has one) or ``predicted``. None for 0. Raises `ConfigError`."""
    if name == PREDICTED:
        return PredictedWindow(step_time)
    if name == ADAPTIVE:
        promised = [targets.of(service).ttft_p99 for service in ServiceClass]
        target = next((ms for ms in promised if ms is not None), None)
        if target is None:
            raise ConfigError("the adaptive window follows a target for the first token (ttft_p99): state one")
        return AdaptiveWindow(target, queue_limit, cpu_share=cpu_share)
    try:
        ms = milliseconds(f"{name}ms" if name[-1:].isdecimal() else name)
    except ValueError:
        raise ConfigError(
            f"{name!r:.80} is no batch window: give a time as in 2ms, {ADAPTIVE} or {PREDICTED}"
        ) from None
    return StaticWindow(ms) if ms else None


def _never_busy() -> float:
    return 0.0


class Hold:
    """Whether the waiting requests are kept back. The scheduler's own: it tells who came and when the queue is empty.

    A window breaks no promise. A request of a class with ``max_queue`` goes at once, and takes with it all that are
    held; so does any other when half of its ``starts_within``, or half of the time to its deadline, is over.
    """

    def __init__(self, window: BatchWindow, targets: Targets) -> None:
        self.window = window
        self._targets = targets
        self._oldest_ns: int | None = None  # None while nobody is held
        self._latest_ns = 0  # no promise allows it to last longer
        self.wake_ns = 0

    def arrived(self, request: Request, *, queue_was_empty: bool) -> None:
        """``request`` was queued; its last stamp says when."""
        now = request.timeline.times[-1]
        self.window.arrived(now, request.num_prompt)
        latest = self._latest(request, now)
        if queue_was_empty:
            self._oldest_ns, self._latest_ns = now, latest
        else:
            self._latest_ns = min(self._latest_ns, latest)

    @property
    def holding(self) -> bool:
        return self._oldest_ns is not None

    def keeps(self, now_ns: int, waiting: int, load: StepLoad) -> bool:
        """True while none of the ``waiting`` may start; ``wake_ns`` is then when they may."""
        self.wake_ns = 0
        if self._oldest_ns is None:
            return False
        until = min(self.window.hold_until_ns(now_ns, self._oldest_ns, waiting, load), self._latest_ns)
        if not waiting or until <= now_ns:
            self._oldest_ns = None
            return False
        self.wake_ns = until
        return True

    def _latest(self, request: Request, now_ns: int) -> int:
        promised = self._targets.of(request.service)
        if promised.max_queue is not None:
            return now_ns
        latest = now_ns + round(promised.starts_within * NS_PER_MS / 2)
        if request.deadline_ns:
            latest = min(latest, now_ns + (request.deadline_ns - now_ns) // 2)
        return latest


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + NEWEST * (value - before)


def _with_prompts(load: StepLoad, count: int, tokens: int) -> StepLoad:
    for _ in range(count):
        load = load.with_chunk(0, tokens)
    return load
