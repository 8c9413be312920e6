"""What requests want of their prompts' hidden states, taken from each chunk as it is computed.

Both executors go the same way: `start` and `retire` with the plan, `wanted` says which rows of a step are read, `read`
queues the work on their hidden states after the final norm, and `results` gives, once the step has ended, what the
prompts that are complete have come to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from firsttoken.core.plan import PromptLogprobs, RowSample, RowStart, RowWork
from firsttoken.core.pooling import PoolingKind
from firsttoken.sampling.prompt_logprobs import ROWS_AT_ONCE, prompt_logprobs
from firsttoken.sampling.sampler import NON_FINITE

NON_FINITE_HIDDEN = "non-finite hidden state"


@dataclass(slots=True, eq=False)
class _Reader:
    """One request's prompt so far. ``targets`` are its tokens, int64 on the host, where log-probabilities are wanted:
    a device has those of a chunk at a time. ``total`` is the sum of what was pooled up to position ``upto``, float64,
    so that the vector does not depend on where chunks were cut. A step that is computed twice changes nothing."""

    pooling: PoolingKind | None
    count: int  # of alternatives
    num_prompt: int
    targets: NDArray[np.int64] | None
    total: Tensor | None = None
    upto: int = 0
    pieces: list[tuple[bytes, bytes]] = field(default_factory=list)
    failed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Token rows ``first`` to before ``end`` of a step are the prompt's positions from ``position`` on. ``last``: the
    prompt ends with this step."""

    slot: int
    reader: _Reader
    position: int
    first: int
    end: int
    last: bool


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """What was queued for one `Wanted`: host tensors that are filled when the step has ended."""

    slot: int
    reader: _Reader
    last: bool
    logprobs: tuple[Tensor, Tensor] | None = None
    pooled: Tensor | None = None


class PromptReaders:
    """``logits`` maps hidden states after the final norm, ``[R, H]``, to float32 ``[R, V]``."""

    def __init__(self, device: torch.device | str, logits: Callable[[Tensor], Tensor]) -> None:
        self._device = torch.device(device)
        self._logits = logits
        self._readers: dict[int, _Reader] = {}

    def start(self, row: RowStart) -> None:
        """A request takes its row (again, after preemption: then its prompt has been told of if it has output)."""
        count = row.params.prompt_logprobs
        known = len(row.tokens) // 4
        if (row.pooling is None and count is None) or known > row.num_prompt:
            self._readers.pop(row.slot, None)
            return
        targets = None
        if count is not None:
            targets = np.frombuffer(row.tokens, dtype="<u4").astype(np.int64)
        self._readers[row.slot] = _Reader(row.pooling, count or 0, row.num_prompt, targets)

    def retire(self, slot: int) -> None:
        self._readers.pop(slot, None)

    def pools(self, slot: int) -> bool:
        """The row's sample is a vector, and no token need be chosen."""
        reader = self._readers.get(slot)
        return reader is not None and reader.pooling is not None

    def wanted(self, work: Sequence[RowWork], first_rows: Callable[[], Sequence[int]]) -> list[Wanted]:
        """Which rows of a step to read; ``first_rows`` says where each work item's token rows begin. Call it once a
        step: a prompt that ends with it is given up."""
        if not self._readers:
            return []
        found = []
        for row, first in zip(work, first_rows(), strict=True):
            reader = self._readers.get(row.slot)
            if reader is None:
                continue
            begin, end = row.start, row.start + row.count
            if reader.pooling == "last":
                begin = end - 1 if row.sample else end
            elif reader.pooling is None:
                end = min(end, reader.num_prompt - 1)  # what follows the last token is not of the prompt
            offset = first - row.start
            if begin < end or row.sample:
                found.append(Wanted(row.slot, reader, begin, offset + begin, offset + max(begin, end), row.sample))
            if row.sample:
                del self._readers[row.slot]
        return found

    def read(self, wanted: Sequence[Wanted], hidden: Sequence[Tensor]) -> list[Read]:
        """Queue the work on the ``hidden`` states of each, ``[end - first, H]``."""
        return [self._read(one, states) for one, states in zip(wanted, hidden, strict=True)]

    def _read(self, one: Wanted, states: Tensor) -> Read:
        reader = one.reader
        if reader.pooling is None:
            return Read(one.slot, reader, one.last, logprobs=self._logprobs(one, states))
        if one.position >= reader.upto:
            reader.upto = one.position + len(states)
            of_chunk = states.sum(0, dtype=torch.float64)
            reader.total = of_chunk if reader.total is None else reader.total.add_(of_chunk)
        if not one.last:
            return Read(one.slot, reader, last=False)
        assert reader.total is not None, "a prompt has a last token"
        pooled = reader.total / reader.num_prompt if reader.pooling == "mean" else reader.total
        return Read(one.slot, reader, last=True, pooled=self._to_host(pooled.float()))

    def _logprobs(self, one: Wanted, states: Tensor) -> tuple[Tensor, Tensor] | None:
        assert one.reader.targets is not None
        if not len(states):
            return None
        targets = to_device(one.reader.targets[one.position + 1 : one.position + 1 + len(states)], self._device)
        parts = [
            prompt_logprobs(self._logits(some), own, one.reader.count)
            for some, own in zip(torch.split(states, ROWS_AT_ONCE), torch.split(targets, ROWS_AT_ONCE), strict=True)
        ]
        values, ids = zip(*parts, strict=True)
        return self._to_host(torch.cat(values)), self._to_host(torch.cat(ids))

    def _to_host(self, value: Tensor) -> Tensor:
        if value.device.type == "cpu":
            return value
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return host.copy_(value, non_blocking=True)


def to_device(values: NDArray[np.int64], device: torch.device) -> Tensor:
    """The copy waits for nothing, as one of memory that is not pinned would for all steps in flight."""
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def results(reads: Sequence[Read], samples: Sequence[RowSample]) -> list[RowSample]:
    """``samples`` of a step that has ended, with what was read of the prompts that are complete."""
    found: dict[int, RowSample] = {}
    by_slot = {sample.slot: sample for sample in samples}
    for read in reads:
        reader = read.reader
        if read.logprobs is not None:
            values, ids = read.logprobs[0].numpy(), read.logprobs[1].numpy()
            reader.failed = reader.failed or bool(np.isnan(values[:, 0]).any())
            reader.pieces.append((values.tobytes(), ids.tobytes()))
        if read.last:
            found[read.slot] = _complete(by_slot[read.slot], reader, read.pooled)
    return [found.get(sample.slot, sample) for sample in samples]


def _complete(sample: RowSample, reader: _Reader, pooled: Tensor | None) -> RowSample:
    if sample.error is not None and reader.pooling is None:
        return sample
    if pooled is not None:
        vector = pooled.numpy()
        if not np.isfinite(vector).all():
            return msgspec.structs.replace(sample, error=NON_FINITE_HIDDEN)
        return msgspec.structs.replace(sample, error=None, pooled=vector.astype("<f4").tobytes())
    if reader.failed:
        return msgspec.structs.replace(sample, error=NON_FINITE)
    values, ids = (b"".join(part) for part in zip(*reader.pieces, strict=True)) if reader.pieces else (b"", b"")
    return msgspec.structs.replace(sample, prompt_logprobs=PromptLogprobs(reader.count, values, ids))
