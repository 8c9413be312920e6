"""How many KV blocks a start must leave for the growth of those that run.

Not the sum of what each may still grow: they end one after the other, and each end gives back a prompt and an output.
So the blocks in use are followed to the last expected end, and the most of them must fit: a start is refused only for a
shortage that is expected. (The sum of all served a third fewer tokens a second on scarce KV; with a watermark alone
every third request was preempted, with gaps of a second.)
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import ceil

from firsttoken.core.request import Request
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache import KVCache
from firsttoken.scheduler.output_lengths import OutputLengths

# While nobody starts or ends, what is expected of the running requests changes little in so many steps.
CURVE_STEPS = 16


class KVReservation:
    """Owns what was learned of output lengths, and how long each running request is expected to get.

    As long as a length is not learned, `OutputLengths` answers ``max_tokens``; at most a row's equal part of the pool
    counts of that: many callers name none, and rows would stay empty for outputs of the model's whole length.
    """

    def __init__(self, kv: KVCache, rows: int) -> None:
        self._kv = kv
        self._lengths = OutputLengths()
        self._part = max(kv.num_blocks // rows, 1) * kv.block_tokens
        self._rows: dict[int, _Row] = {}
        self._ends = [0] * len(ServiceClass)  # blocks at their expected ends, by class
        self._curves: dict[int, _Curve] = {}
        self._steps = 0  # since the curves were begun anew

    def started(self, request: Request) -> None:
        row = self._rows[request.request_id] = _Row(request, self._expected(request), self._kv.block_tokens)
        self._ends[row.service] += row.end
        self._forget_curves()

    def left(self, request: Request) -> None:
        """It has no row any more: it ended, or was preempted."""
        row = self._rows.pop(request.request_id, None)
        if row is not None:
            self._ends[row.service] -= row.end
            self._forget_curves()

    def ended(self, request: Request) -> None:
        """Whether it ran or not, and by whom it was ended: its length is learned from."""
        self.left(request)
        self._lengths.learn(request)

    def planned(self) -> None:
        """A step was planned, in which all that run grew as their curve says."""
        self._steps += 1
        if self._steps == CURVE_STEPS:
            self._forget_curves()

    def _forget_curves(self) -> None:
        self._steps = 0
        self._curves.clear()

    def growth(self, request: Request, free: int) -> int:
        """Blocks beyond those for its known tokens that must be available for ``request`` to start beside the running
        ones of its class and better, whom it must not push out; worse ones make way. ``free`` blocks are available: if
        that is enough whatever ends when, the answer is 0. None is needed beside nobody, or the largest would never
        start. O(1) while KV is plentiful, else O(running) whenever somebody has started or ended."""
        if not self._rows:
            return 0
        service, kv = int(request.service), self._kv
        rest = max(self._expected(request) - request.num_output, 1)
        own = _blocks(request.num_tokens + rest - 1, kv.block_tokens)
        if sum(self._ends[: service + 1]) + own <= kv.pool.num_used + free:
            return 0
        curve = self._curves.get(service)
        if curve is None:
            curve = self._curves[service] = self._curve(service)
        grown = kv.pool.num_used - curve.used
        return max(curve.peak_with(rest, kv.blocks_for(request.num_tokens)) - grown, 0)

    def _curve(self, service: int) -> _Curve:
        rows, worse = [], 0
        for row in self._rows.values():
            rest, held = self._look(row)
            if row.service <= service:
                rows.append((rest, held))
            else:
                worse += held
        return _Curve(rows, worse, self._kv.block_tokens, self._kv.pool.num_used)

    def _expected(self, request: Request) -> int:
        known = self._lengths.expected(request)
        if known is not None:
            return known
        return min(request.max_tokens, max(self._part, request.num_output + self._kv.block_tokens))

    def _look(self, row: _Row) -> tuple[int, int]:
        """(Tokens still to come, blocks held) of a row; one that got longer than expected is judged anew."""
        request, size = row.request, self._kv.block_tokens
        if request.num_output >= row.expected < request.max_tokens:
            self._ends[row.service] -= row.end
            row.expect(self._expected(request), size)
            self._ends[row.service] += row.end
        return max(row.expected - request.num_output, 1), _blocks(len(request.tokens), size)


class _Row:
    __slots__ = ("end", "expected", "request", "service")

    def __init__(self, request: Request, expected: int, block_tokens: int) -> None:
        self.request = request
        self.service = int(request.service)
        self.expect(expected, block_tokens)

    def expect(self, output: int, block_tokens: int) -> None:
        self.expected = output
        self.end = _blocks(self.request.num_prompt + output - 1, block_tokens)


class _Curve:
    """Blocks in use beyond those of now, at each expected end of a row, just before it gives its own back; every row
    gets one token a step until then. ``spare`` blocks are there for it besides; ``used`` are in use now."""

    def __init__(self, rows: list[tuple[int, int]], spare: int, block_tokens: int, used: int) -> None:
        rows.sort()
        self.used = used
        self._spare = spare
        self._size = block_tokens
        self._rests = [rest for rest, _ in rows]
        count = len(rows)
        self._freed = [0, *accumulate([held for _, held in rows])]  # what they grow comes and goes
        use = [(count - i) * rest / block_tokens - self._freed[i] for i, rest in enumerate(self._rests)]
        # The most up to each place if one more row grows along, and the most from each place on if none does.
        grown = [least + rest / block_tokens for least, rest in zip(use, self._rests, strict=True)]
        self._before = [0.0, *accumulate(grown, max)]
        self._after = list(accumulate(reversed(use), max))[::-1]

    def peak_with(self, rest: int, held: int) -> int:
        """The most, rounded up, with one more row, of ``rest`` tokens to come and ``held`` blocks; or less than 0."""
        place = bisect_left(self._rests, rest)
        alive = len(self._rests) - place + 1
        at_its_end = alive * rest / self._size - self._freed[place]
        later = self._after[place] - held if place < len(self._rests) else 0.0
        return ceil(max(self._before[place], at_its_end, later)) - self._spare


def _blocks(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)
