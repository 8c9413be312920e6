"""One caller's request while it runs: its ``n`` answers merged into one asynchronous stream of deltas."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from firsttoken.core.clock import NS_PER_S, now_ns
from firsttoken.core.errors import EngineDead, FirstTokenError
from firsttoken.core.plan import PromptLogprobs, TokenLogprobs
from firsttoken.core.request import EngineRequest
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import ServiceClass
from firsttoken.core.timeline import Mark, Timeline
from firsttoken.frontend.answer import Answer, Delta, merged
from firsttoken.frontend.consumer import Consumer
from firsttoken.frontend.failures import failure, refused
from firsttoken.frontend.gaps import AccountMaker, GapSources
from firsttoken.frontend.link import EngineLink
from firsttoken.frontend.times import Beside, FirstToken, RequestTimes
from firsttoken.transport.messages import Refused, RequestDelta

if TYPE_CHECKING:
    from firsttoken.core.outcome import Outcome
    from firsttoken.observability.metrics import FrontendMetrics
    from firsttoken.text.tokenizer import Tokenizer

__all__ = ["Delta", "Generation"]


# Of an answer (its index), what came, and when.
Arrival = tuple[int, RequestDelta, int]

# Arrivals (a token each, as a rule) that a consumer turns into text before it lets others run: a reader that comes back
# late to thousands of tokens and dozens of stop strings must not hold up the rest.
_TURN = 128


class Generation:
    """An asynchronous iterator of `Delta`, for one consumer, on the event loop that opened it.

    Each answer's last delta has a ``finish_reason``; after the last answer's the iteration stops. What the engine
    sends is only noted when it comes; text is made in the consumer's own task, so no caller waits for another's
    detokenising. Tokens that pile up behind a slow consumer are merged into few deltas; their number is bounded by
    ``max_tokens``. A consumer who has little to do for a delta needs no task for it: see `frontend.flow`.

    The account of time is that of the answer that ended last: the caller waits for that one.

    The iteration raises `InvalidRequest` when the engine refused the request, `Overloaded` when it cannot be served in
    time, `DeadlineExceeded` when it did not start in time, `GenerationFailed` when it failed in the engine, and
    `EngineDead` when the engine stopped; what arrived before is given first.
    """

    __slots__ = (
        "_answers",
        "_began_ns",
        "_beside",
        "_books",
        "_came_ns",
        "_consumer",
        "_error",
        "_final",
        "_first",
        "_gave_ns",
        "_link",
        "_live",
        "_metrics",
        "_parting",
        "_pending",
        "_ready",
        "_sources",
        "_times",
        "_unbooked",
        "_waiter",
        "_when_known",
        "behind",
        "ending",
        "engine_ids",
        "finish_reason",
        "id",
        "more",
        "outcome",
        "params",
        "pooled",
        "prompt_logprobs",
        "prompt_tokens",
        "service",
        "tenant",
        "unfinished",
    )

    def __init__(
        self,
        link: EngineLink,
        requests: list[EngineRequest],
        params: SamplingParams,
        *,
        tokenizer: Tokenizer | None,
        metrics: FrontendMetrics,
        request_id: str | None = None,
        timeline: Timeline,
        sources: GapSources | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self.id = request_id if request_id is not None else f"req-{secrets.token_hex(12)}"
        self.prompt_tokens = len(requests[0].prompt) // 4
        self.engine_ids = tuple(request.id for request in requests)
        self.finish_reason: str | None = None  # of the answer that ended last
        self.outcome: Outcome = "aborted"  # as the books have it; of several answers, of the last that was booked
        self.params = params
        # Of the prompt, if asked for, and known before the first delta is given.
        self.prompt_logprobs: PromptLogprobs | None = None
        self.pooled: bytes | None = None
        self._link = link
        self._sources = sources
        self.service = ServiceClass(requests[0].service)
        self.tenant = requests[0].tenant
        self._metrics = metrics.of(self.service)
        stop_ids = frozenset(requests[0].stop_ids)
        self._answers = [Answer(index, params, stop_ids, tokenizer, shown) for index in range(len(requests))]
        # Engine ids of the answers whose last delta has not come yet. Their order is the answers'.
        self._live = {request.id: index for index, request in enumerate(requests)}
        self._parting: set[int] = set()  # engine ids of aborted answers of which the engine has not said its last word
        self._when_known: list[Callable[[], None]] = []
        self._pending: list[Arrival] = []
        self.behind = False  # more was waiting than one turn takes: others are to run before the next is taken
        self.more = False  # what was taken was not all that is there
        self._ready: deque[Delta] = deque()
        self.unfinished = len(requests)  # answers whose last delta has not been taken
        self.ending = False  # the last of all has been taken, or an error waits to be raised
        self._error: FirstTokenError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._consumer: Consumer | None = None  # None: whoever iterates
        self._began_ns = timeline.times[0]
        copies = [Timeline(timeline.stamps()) for _ in requests[1:]]  # each answer has its own way from here on
        self._beside = Beside()
        self._first = FirstToken(self._began_ns, self._metrics.first_token)
        self._books = link.books
        self._times = [
            RequestTimes(one, self._beside, first=self._first, note_gap=self._metrics.gaps.note)
            for one in (timeline, *copies)
        ]
        self._came_ns = 0  # when the consumer last asked
        self._gave_ns = 0  # when he last got something
        self._final = 0  # the answer that ended last so far
        self._unbooked = set(range(len(requests)))  # answers whose outcome is not counted yet
        self._metrics.started(len(requests))

    # ------------------------------------------------------------ for the caller

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        self.passed_on()
        while True:
            if self.behind and not self._ready:
                await asyncio.sleep(0)  # the others' turn
            delta = self.take()
            if delta is not None:
                return delta
            if not self.unfinished:
                raise StopAsyncIteration
            await self._wait()

    def take(self) -> Delta | None:
        """The next delta, if something is there to make it of. Raises what the iteration raises, in its place."""
        while not self._ready:
            if not self._pending:
                if self._error is not None:
                    raise self._error
                return None
            got_ns = now_ns()
            if len(self._pending) == 1:
                arrival = self._pending.pop()
                self.behind = self.more = False
                made = self._make(arrival, arrival[1].tokens, arrival[1].logprobs, got_ns)
            else:
                made = self._make_of_many(got_ns)
            self._gave_ns = now_ns()
            if self.unfinished:
                self._beside.detokenize += self._gave_ns - got_ns
            if made is not None:
                return made
        self._gave_ns = now_ns()
        delta = self._ready.popleft()
        self.more = self.behind or bool(self._ready)
        return delta

    @property
    def waiting(self) -> int:
        """How many deltas have arrived and were not taken."""
        return len(self._pending)

    def give_up(self, error: FirstTokenError) -> None:
        """End unfinished answers with ``error``, and drop what has arrived and was not taken."""
        self._pending.clear()
        self._fail(error)

    def passed_on(self) -> None:
        """The consumer has done with what he took, and asks for more. Only now is it in the books: somebody was waiting
        for what he passes on."""
        self._came_ns = now_ns()
        if self._gave_ns and self.unfinished:
            self._beside.write += self._came_ns - self._gave_ns
        self._books.settle()

    @property
    def completion_tokens(self) -> int:
        """Of all answers so far."""
        return sum(answer.num_tokens for answer in self._answers)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache; known once the first delta came."""
        self._books.settle()
        return self._times[0].cached_tokens

    @property
    def timeline(self) -> Timeline:
        """Of the answer that ended last so far."""
        return self._times[self._final].timeline

    @property
    def times(self) -> RequestTimes:
        """What is known of its time."""
        self._books.settle()
        return self._times[self._final]

    @property
    def ttft_ns(self) -> int | None:
        """From the request's beginning until the consumer got the first token of any answer; None before it."""
        self._books.settle()
        return self._first.after_ns

    @property
    def error_code(self) -> str:
        """The word for the error that ended it, "" without one."""
        return "" if self._error is None else self._error.word

    @property
    def due(self) -> bool:
        """`take` has something to give, or to raise."""
        return bool(self._ready or self._pending) or self._error is not None

    @property
    def finished(self) -> bool:
        """True when nothing more will come from the engine: all answers ended, or an error waits to be raised."""
        return self._error is not None or not self._live

    def cancel(self) -> None:
        """End all unfinished answers now, here and in the engine. The iteration then gives what had arrived, with
        ``finish_reason`` "abort". Idempotent; does nothing after the end."""
        self._books.settle()
        self._book(self._unbooked, "aborted")  # some may have ended in the engine, and nobody came for the rest
        if not self._live:
            return
        live, self._live = self._live, {}
        self._parting.update(live)
        self._final = min(live.values())
        self.finish_reason = "abort"
        now = self.timeline.stamp(Mark.FINISHED)
        for engine_id, index in live.items():
            self._pending.append((index, RequestDelta(engine_id, [], finish_reason="abort"), now))
        self._link.abort(list(live), self)
        self.wake()

    def end(self, index: int) -> None:
        """End answer ``index`` now with "stop", as a stop string would: its consumer needs no more of it. Does nothing
        after its end."""
        answer = self._answers[index]
        if answer.finish_reason is None and self._error is None:
            answer.finish_reason = "stop"
            now = now_ns()
            self._finish(index, engine_ended=False, ns=now, got_ns=now)

    def when_known(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` once the account is complete: at once, or when the engine has said its last word of answers
        that were cancelled."""
        if self._parting:
            self._when_known.append(tell)
        else:
            tell()

    def timings(self) -> dict[str, Any]:
        """The account of time so far; see `observability.account.timings`."""
        return self.account()()

    def stages(self) -> dict[str, float]:
        """The stages of `timings`, which take a fraction of its time to make."""
        return self.times.stages()

    def account(self) -> AccountMaker:
        """Makes `timings` when it is called, and keeps nothing of the request but its times."""
        return AccountMaker(self.times, self._sources, self.engine_ids, self.tenant)

    # ------------------------------------------------ from the engine (a `Sink`)

    def deliver(self, delta: RequestDelta, ns: int) -> None:
        consumer = self._consumer
        if consumer is None:
            self.keep(delta, ns)
            if self._waiter is not None:
                self.wake()
            return
        flow = consumer.flow
        if flow.busy or self._pending or delta.stamps or delta.finish_reason is not None:
            self.keep(delta, ns)
            consumer.arrived()
            return
        # Nearly always: tokens and nothing else, with nothing before them. All in one function, since a call for each
        # of its parts would cost a tenth of what a token does.
        flow.busy = True
        try:
            got_ns = now_ns()
            index = self._live[delta.id]
            answer = self._answers[index]
            made = answer.push(delta.tokens, delta.logprobs)
            if made.finish_reason is None:
                made_ns = now_ns()
                rest = consumer.tell(made)
                passed_ns = now_ns()
                self._books.add((self._times[index], delta, ns, self._came_ns, got_ns, made_ns, passed_ns))
                self._came_ns = self._gave_ns = passed_ns
                if answer.scan_ns:
                    self._beside.stop += answer.scan_ns
            else:
                self._books.add((self._times[index], delta, ns, self._came_ns, got_ns, got_ns, got_ns))
                self._finish(index, engine_ended=False, ns=ns, got_ns=got_ns)
                self._gave_ns = now_ns()
                rest = consumer.tell(made)
        except Exception as error:  # the consumer's to raise: it is not the engine's link that is at fault
            flow.hand_over(error=error)
            return
        if rest is None and not self.ending:
            flow.busy = False
        else:
            flow.hand_over(rest, self)

    def keep(self, delta: RequestDelta, ns: int) -> None:
        index = self._live[delta.id]
        if delta.finish_reason is not None:
            del self._live[delta.id]
        self._pending.append((index, delta, ns))

    def wake(self) -> None:
        if self._consumer is not None:
            self._consumer.wake()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def refuse(self, refusal: Refused) -> None:
        self._live.pop(refusal.id, None)
        self._fail(refused(refusal), begins=Mark.FAILED)

    def die(self, error: EngineDead) -> None:
        self._live.clear()
        self._fail(EngineDead(str(error), error.retry_after_s))

    def part(self, request_id: int, last: RequestDelta | None) -> None:
        index = self.engine_ids.index(request_id)
        if last is not None and index == self._final:  # nobody asks for the others' times
            self._times[index].complete(last)
        self._parting.discard(request_id)
        if not self._parting:
            waiting, self._when_known = self._when_known, []
            for tell in waiting:
                tell()

    # -------------------------------------------------------------------- inside

    def attach(self, consumer: Consumer) -> None:
        """From now on ``consumer`` is told of arrivals, until `detach`. Raises RuntimeError where somebody is."""
        self._refuse_another()
        self._consumer = consumer

    def detach(self) -> None:
        self._consumer = None

    def _refuse_another(self) -> None:
        if self._waiter is not None or self._consumer is not None:
            raise RuntimeError(f"request {self.id} has a consumer already: a Generation is for one")

    async def _wait(self) -> None:
        self._refuse_another()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _fail(self, error: FirstTokenError, index: int | None = None, *, begins: Mark = Mark.FINISHED) -> None:
        """End with ``error``, that of answer ``index`` or, without it, of all: raised once what has arrived is
        consumed. Answers that still run are aborted. ``begins``: the state that begins now."""
        if self._error is None:
            self._books.settle()
            self._error = error
            self.ending = True
            live, self._live = self._live, {}
            self._final = min(live.values(), default=self._final) if index is None else index
            self._book(self._unbooked, error.outcome)
            self._link.abort(list(live))
            self.timeline.stamp(begins)
        self.wake()

    def _make_of_many(self, got_ns: int) -> Delta | None:
        """The first of the deltas of what has arrived, up to a turn's share: one for each answer that gained something.
        The others are then ready."""
        groups: dict[int, list[Arrival]] = {}
        for arrival in self._pending[:_TURN]:
            groups.setdefault(arrival[0], []).append(arrival)
        del self._pending[:_TURN]
        self.behind = bool(self._pending)
        for arrivals in groups.values():
            made = self._make(arrivals[-1], *merged([delta for _, delta, _ in arrivals]), got_ns, arrivals[:-1])
            if made is not None:
                self._ready.append(made)
        made = self._ready.popleft() if self._ready else None
        self.more = self.behind or bool(self._ready)
        return made

    def _make(
        self,
        arrival: Arrival,
        tokens: list[int],
        logprobs: list[TokenLogprobs] | None,
        got_ns: int,
        before: Sequence[Arrival] = (),
    ) -> Delta | None:
        """The delta of these tokens of an answer, which came with ``before`` and at last ``arrival``; None for
        nothing new."""
        index, last, ns = arrival
        answer = self._answers[index]
        if answer.finish_reason is not None:
            return None  # a stop string ended it while these were on their way
        times, came_ns = self._times[index], self._came_ns
        for _, one, one_ns in before:
            self._books.add((times, one, one_ns, came_ns, got_ns, got_ns, got_ns))
            self._look(one)
        self._books.add((times, last, ns, came_ns, got_ns, got_ns, got_ns))
        if last.stamps:
            self._look(last)
        reason = last.finish_reason
        if reason == "error":
            self._fail(failure(last), index)
            reason = None
        if not tokens and reason is None:
            return None
        made = answer.push(tokens, logprobs, reason, last.stop_reason)
        if made.finish_reason is not None:
            self._finish(index, engine_ended=reason is not None, ns=ns, got_ns=got_ns)
        if answer.scan_ns and self.unfinished:
            self._beside.stop += answer.scan_ns
        return made

    def _look(self, delta: RequestDelta) -> None:
        """Take what is told once, as the engine's stamps are."""
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.pooled is not None:
            self.pooled = delta.pooled

    def _finish(self, index: int, *, engine_ended: bool, ns: int, got_ns: int) -> None:
        """The answer has its last delta: free what it held in the engine, and close the books."""
        self._books.settle()
        self.unfinished -= 1
        self.ending = self.ending or not self.unfinished
        reason = self._answers[index].finish_reason or ""
        if self._book({index}, "aborted" if reason == "abort" else "finished"):
            self._metrics.finished(reason)
        if not engine_ended:
            for engine_id, live_index in self._live.items():
                if live_index == index:
                    del self._live[engine_id]
                    self._link.abort([engine_id], finished=True)
                    break
        self._times[index].finish(ns, self._came_ns, got_ns, self._answers[index].scan_ns)
        self._final, self.finish_reason = index, self._answers[index].finish_reason
        if self.unfinished == 0 and self.outcome == "finished" and self._error is None:
            # Only whole answers: how soon others ended says nothing about how long answers take.
            self._metrics.request_done((ns - self._began_ns) / NS_PER_S)

    def _book(self, indexes: set[int], outcome: Outcome) -> bool:
        """Count how these answers ended, unless that was counted already; True when it was not for all."""
        fresh = self._unbooked & indexes
        if fresh:
            self._unbooked -= fresh
            self.outcome = outcome
            self._metrics.ended(outcome, len(fresh))
        return bool(fresh)
