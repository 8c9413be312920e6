"""The steps of the last minutes as the front end keeps them: records of the last seconds at hand, older ones packed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from firsttoken.core.clock import NS_PER_S
from firsttoken.core.step_record import StepRecord

# Records of one packed piece. So few that to pack one holds an event loop for a tenth of a millisecond.
PIECE = 256

_PACK = msgspec.msgpack.Encoder()
_UNPACK = msgspec.msgpack.Decoder(list[StepRecord])


@dataclass(frozen=True, slots=True)
class _Piece:
    """`PIECE` records in a row, packed, and what they are found by."""

    last_id: int
    planned_ns: int  # of the first
    harvested_ns: int  # of the last
    data: bytes

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> _Piece:
        return cls(records[-1].step_id, records[0].planned_ns, records[-1].harvested_ns, _PACK.encode(records))


class StepHistory:
    """A ring of the steps of the last ``keep_s`` seconds, in ``max_bytes`` of packed records at most, and beside them
    ``at_hand`` records and a few hundred more that are not packed. Steps come in their order. One thread adds and asks.
    """

    def __init__(self, keep_s: float = 300.0, max_bytes: int = 32 << 20, at_hand: int = 4096) -> None:
        if keep_s <= 0 or max_bytes < 1 or at_hand < 1:
            raise ValueError(f"a step history needs positive limits, got {keep_s} s, {max_bytes} B, {at_hand} records")
        self._keep_ns = int(keep_s * NS_PER_S)
        self._max_bytes = max_bytes
        self._at_hand = at_hand
        self._recent: list[StepRecord] = []
        self._pieces: deque[_Piece] = deque()
        self._nbytes = 0
        self._packed = 0

    def __len__(self) -> int:
        return self._packed + len(self._recent)

    @property
    def packed_bytes(self) -> int:
        return self._nbytes

    def add(self, records: Iterable[StepRecord]) -> None:
        """The newest steps, the oldest of them first."""
        recent = self._recent
        recent.extend(records)
        while len(recent) >= self._at_hand + PIECE:
            piece = _Piece.of(recent[:PIECE])
            del recent[:PIECE]
            self._pieces.append(piece)
            self._nbytes += len(piece.data)
            self._packed += PIECE
        self._drop_old()

    def _drop_old(self) -> None:
        recent = self._recent
        if not recent:
            return
        oldest_ns = recent[-1].harvested_ns - self._keep_ns
        if recent[0].harvested_ns < oldest_ns:  # a slow engine's records at hand reach back further
            del recent[: bisect_left(recent, oldest_ns, key=_harvested)]
        while self._pieces and (self._pieces[0].harvested_ns < oldest_ns or self._nbytes > self._max_bytes):
            self._nbytes -= len(self._pieces.popleft().data)
            self._packed -= PIECE

    def copied(self) -> StepHistory:
        """The same steps in an object of their own, for another thread; costs little, as packed ones stay packed."""
        copy = StepHistory(self._keep_ns / NS_PER_S, self._max_bytes, self._at_hand)
        copy._recent, copy._pieces = self._recent.copy(), self._pieces.copy()
        copy._nbytes, copy._packed = self._nbytes, self._packed
        return copy

    def pieces(self) -> Iterator[list[StepRecord]]:
        """All, the oldest first, `PIECE` at a time."""
        for piece in self._pieces:
            yield _unpacked(piece)
        for first in range(0, len(self._recent), PIECE):
            yield self._recent[first : first + PIECE]

    def last(self, count: int) -> list[StepRecord]:
        """The newest ``count``, the oldest of them first; fewer when there are no more."""
        if count <= 0:
            return []
        found = self._recent[-count:]
        for piece in reversed(self._pieces):
            if len(found) >= count:
                break
            found = _unpacked(piece) + found
        return found[-count:]

    def since(self, step_id: int) -> list[StepRecord]:
        """All that came after the step of this id, the oldest first."""
        found = [record for piece in self._pieces if piece.last_id > step_id for record in _unpacked(piece)]
        found += self._recent
        return found[bisect_right(found, step_id, key=_id) :]

    def between(self, start_ns: int, end_ns: int) -> list[StepRecord]:
        """All that were under way at some time from ``start_ns`` to ``end_ns``, from planning to harvest."""
        found: list[StepRecord] = []
        for piece in self._pieces:
            if piece.harvested_ns >= start_ns and piece.planned_ns <= end_ns:
                found += _unpacked(piece)
        if self._recent and self._recent[0].planned_ns <= end_ns:
            found += self._recent
        first = bisect_left(found, start_ns, key=_harvested)
        return found[first : bisect_right(found, end_ns, key=_planned)]


def _unpacked(piece: _Piece) -> list[StepRecord]:
    return _UNPACK.decode(piece.data)


def _id(record: StepRecord) -> int:
    return record.step_id


def _harvested(record: StepRecord) -> int:
    return record.harvested_ns


def _planned(record: StepRecord) -> int:
    return record.planned_ns
