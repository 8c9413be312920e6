"""The sampler on the device: each slot's parameters lie there, and tokens are chosen without a word to the host.

The pipeline and its definitions are those of `firsttoken.sampling.sampler`, except for the draw itself: Gumbel-max,
with noise for each token (`kernels/sample/triton.py`), where the host walks the cumulative mass with a single number.
Both are exact, and the same request draws different tokens on the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from firsttoken.core.sampling_params import SamplingParams
from firsttoken.kernels.sample import state as words
from firsttoken.kernels.sample.state import Outputs, RichScratch, Scratch, Step
from firsttoken.kernels.sample.triton import draw, finish, partials
from firsttoken.kernels.sample.triton_edits import copy, edit
from firsttoken.kernels.sample.triton_forbid import forbid
from firsttoken.kernels.sample.triton_logprobs import logprobs
from firsttoken.kernels.sample.triton_search import search
from firsttoken.sampling.device.params import Needs, needs_of, state_row

_FIRST_CAPACITY = 64  # ids in a slot's list of edits
# By value: a flag's own constructor and operators take a microsecond each.
_NEEDS = [Needs(value) for value in range(2 * Needs.MASKS)]
_EDITS, _RICH = Needs.EDITS.value, (Needs.EDITS | Needs.LOGPROBS | Needs.MASKS).value


class DeviceSampler:
    """Chooses tokens for up to ``slots`` requests, ``rows`` of them a step, over ``vocab_size`` tokens.

    A request takes a slot by `start`; or by `take` and `equip`, when the caller brings the slot's state to its row of
    ``words``, int32 ``[slots, S]``, together with what else it sends. `start`, `equip` and `sample` only queue work on
    the current stream. `sample` allocates nothing, so it may be captured in a CUDA graph: with LOGPROBS or MASKS once
    there is the room that is made for the first request that has any of these, with EDITS only as long as the slots'
    lists, which grow, have not moved since.
    """

    def __init__(self, vocab_size: int, slots: int, rows: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.rows = rows
        self.device = torch.device(device)
        self._state = torch.zeros((slots, words.WORDS), dtype=torch.float64, device=device)
        self.words = self._state.view(torch.int32)
        self._scratch = Scratch.allocate(rows, vocab_size, device)
        self._rich: RichScratch | None = None
        self._masks: NDArray[np.int32] | None = None  # those of the rich scratch
        self._edit_ids = torch.zeros((slots, _FIRST_CAPACITY), dtype=torch.int32, device=device)
        self._edit_values = torch.zeros((slots, _FIRST_CAPACITY), dtype=torch.float32, device=device)
        self._allowed: Tensor | None = None  # with the rich scratch
        self._bad = torch.zeros((slots, _FIRST_CAPACITY), dtype=torch.int32, device=device)
        self._needs = [0] * slots
        self._num_logprobs: list[int | None] = [None] * slots

    def start(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        tokens: NDArray[np.integer],
        num_prompt: int,
        stop_ids: Sequence[int] = (),
    ) -> None:
        """A request takes ``slot`` (again, after preemption). ``tokens`` are all its known ones, the prompt first; they
        must be in the table that `sample` gets.

        ``stop_ids`` are the tokens that ``min_tokens`` forbids; ids outside the vocabulary cannot be sampled and are
        passed over. Raises `InvalidRequest` for a ``logit_bias`` outside the vocabulary, ValueError for tokens that
        are.
        """
        row = self.take(slot, params, seed, num_prompt, stop_ids)
        self.equip(slot, params, tokens, stop_ids)
        self._send(torch.from_numpy(row), self._state[slot])

    def take(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        num_prompt: int,
        stop_ids: Sequence[int] = (),
        *,
        masked: bool = False,
    ) -> NDArray[np.float64]:
        """The part of `start` that only the host does; a ``masked`` row has a mask in each step (`set_masks`), which
        decides about stop ids too: it gets none. Returns the slot's state, which as int32 is its row of
        ``words``. Raises `InvalidRequest` as `start` does."""
        num_stops = len(self._stops(params, stop_ids))
        row = state_row(params, seed, num_prompt, num_stops, self.vocab_size, masked=masked)
        needs = needs_of(int(row[words.FLAGS]))
        if needs & _EDITS:
            params.check_vocabulary(self.vocab_size)
        self._needs[slot] = needs
        self._num_logprobs[slot] = params.logprobs
        return row

    def is_plain(self, slot: int) -> bool:
        """`equip` has nothing to do for the request that took the slot."""
        return not self._needs[slot] & _RICH

    def equip(
        self, slot: int, params: SamplingParams, tokens: NDArray[np.integer], stop_ids: Sequence[int] = ()
    ) -> None:
        """The part of `start` for edits and log-probabilities: room and the slot's list. May be done twice. Raises
        ValueError as `start` does."""
        if self._needs[slot] & _EDITS:
            self._check_tokens(slot, tokens)
            self._set_list(slot, params.logit_bias or {}, self._stops(params, stop_ids))
            self._set_bad(slot, params.bad_words_token_ids or ())
            if params.allowed_token_ids is not None:
                self.make_room()
                self._set_allowed(slot, params.allowed_token_ids)
        if not self.is_plain(slot):
            self.make_room()

    def _stops(self, params: SamplingParams, stop_ids: Sequence[int]) -> list[int]:
        """Those that ``min_tokens`` forbids."""
        return [i for i in stop_ids if 0 <= i < self.vocab_size] if params.min_tokens > 0 else []

    def retire(self, slot: int) -> None:
        """Give the slot back; a slot that is free already is left as it is."""
        self._needs[slot] = 0
        self._num_logprobs[slot] = None

    def needs(self, slots: Sequence[int]) -> Needs:
        """What a step in which these slots choose tokens needs."""
        needs = 0
        for slot in slots:
            needs |= self._needs[slot]
        return _NEEDS[needs]

    def num_logprobs(self, slots: Sequence[int]) -> list[int | None]:
        """How many alternatives each slot's request wants; None without log-probabilities."""
        return [self._num_logprobs[slot] for slot in slots]

    def make_room(self) -> None:
        """Allocate what edits and log-probabilities need, 8 bytes a row and token; `equip` does when it must."""
        if self._rich is None:
            self._rich = RichScratch.allocate(self.rows, self.vocab_size, self.device)
            shape = self._state.shape[0], -(-self.vocab_size // 32)
            self._allowed = torch.zeros(shape, dtype=torch.int32, device=self.device)

    def set_masks(self, masks: NDArray[np.int32]) -> None:
        """Those of the next `sample`, int32 [R, ceil(V / 32)], the lowest bit first; rows without one get any. Nothing
        is launched: on a GPU they lie where its kernels read the host's memory, so every `sample` with masks that was
        launched must have ended."""
        if self._masks is None:
            self.make_room()
            assert self._rich is not None
            self._masks = self._rich.masks.numpy()
        self._masks[: len(masks)] = masks

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        table: Tensor,
        outputs: Outputs,
        *,
        needs: Needs,
        best: tuple[Tensor, Tensor] | None = None,
        pdl: bool = False,
    ) -> None:
        """Choose one token a row and write it to ``table[slot, position]`` and to ``outputs``.

        ``logits`` float32 [R, V], R <= ``rows``, stay unchanged; ``slots`` and ``positions`` int32 [R] say whose token
        is chosen and its index in the request (prompt tokens count from 0), which keys its random numbers; a negative
        one marks padding: nothing of that row is written. ``table`` int32 [slots, L]. ``needs`` must hold at least
        what the rows need; more costs a few empty kernels. ``best`` is each tile's largest logit and its id, float32
        and int32 [R, P], when the head left them. Where ``outputs.errors`` is not 0 the token is 0, so that a step
        already in flight may look it up. A row's results do not depend on the other rows, nor on its place.

        Raises ValueError for operands that do not fit.
        """
        step = self._step(logits, slots, positions, table, outputs, best, pdl)
        edits = bool(needs & (Needs.EDITS | Needs.MASKS))
        if step.rows == 0:
            return
        if best is None:
            partials(step)
        finish(step, check_edited=edits)
        if edits:
            copy(step)
            if needs & Needs.EDITS:
                edit(step)
                forbid(step)
                partials(step, edited=True)
            finish(step, edited=True)
        if needs & Needs.SEARCH:
            search(step, edited=edits)
        if needs & Needs.RANDOM:
            draw(step, searched=bool(needs & Needs.SEARCH), edited=edits)
        if needs & Needs.LOGPROBS:
            logprobs(step)

    def _step(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        table: Tensor,
        outputs: Outputs,
        best: tuple[Tensor, Tensor] | None,
        pdl: bool,
    ) -> Step:
        rows = logits.shape[0]
        _expect("logits", logits, torch.float32, (rows, self.vocab_size))
        if rows > self.rows:
            raise ValueError(f"{rows} rows of logits, but this sampler was built for {self.rows}: build it for more")
        _expect("slots", slots, torch.int32, (rows,))
        _expect("positions", positions, torch.int32, (rows,))
        _expect("table", table, torch.int32, (self._state.shape[0], table.shape[-1]))
        if outputs.tokens.shape[0] < rows:
            raise ValueError(f"{rows} rows need outputs for as many, got {outputs.tokens.shape[0]}")
        values, indices = (self._scratch.values, self._scratch.indices) if best is None else best
        if best is not None:
            _expect("best values", values, torch.float32, (rows, values.shape[-1]))
            _expect("best indices", indices, torch.int32, (rows, values.shape[-1]))
        return Step(
            logits=logits,
            slots=slots,
            positions=positions,
            table=table,
            state=self._state,
            values=values,
            indices=indices,
            scratch=self._scratch,
            out=outputs,
            edit_ids=self._edit_ids,
            edit_values=self._edit_values,
            allowed=self._allowed,
            bad=self._bad,
            rich=self._rich,
            pdl=pdl,
        )

    def _check_tokens(self, slot: int, tokens: NDArray[np.integer]) -> None:
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise ValueError(
                f"slot {slot}: token ids must be in 0 to {self.vocab_size - 1}, "
                f"got {int(tokens.min())} to {int(tokens.max())}"
            )

    def _set_list(self, slot: int, bias: dict[int, float], stops: list[int]) -> None:
        ids = [*bias, *stops]
        if not ids:
            return
        if len(ids) > self._edit_ids.shape[1]:
            self._grow(len(ids))
        self._send(torch.tensor(ids, dtype=torch.int32), self._edit_ids[slot, : len(ids)])
        self._send(torch.tensor(list(bias.values()), dtype=torch.float32), self._edit_values[slot, : len(bias)])

    def _set_allowed(self, slot: int, allowed: Sequence[int]) -> None:
        assert self._allowed is not None
        bits = np.zeros(32 * self._allowed.shape[1], dtype=np.bool_)
        bits[list(allowed)] = True
        self._send(torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32)), self._allowed[slot])

    def _set_bad(self, slot: int, sequences: Sequence[Sequence[int]]) -> None:
        """Where each begins, where the last ends, and their tokens."""
        if not sequences:
            return
        ends = list(accumulate(map(len, sequences), initial=len(sequences) + 1))
        listed = [*ends, *(token for ids in sequences for token in ids)]
        if len(listed) > self._bad.shape[1]:
            old = self._bad
            self._bad = old.new_zeros((old.shape[0], 1 << (len(listed) - 1).bit_length()))
            self._bad[:, : old.shape[1]] = old
        self._send(torch.tensor(listed, dtype=torch.int32), self._bad[slot, : len(listed)])

    def _grow(self, needed: int) -> None:
        """Longer lists for every slot. Steps in flight keep the old ones: the allocator gives them back in order."""
        slots, old = self._edit_ids.shape
        capacity = 1 << (needed - 1).bit_length()
        ids, values = self._edit_ids, self._edit_values
        self._edit_ids = ids.new_zeros((slots, capacity))
        self._edit_values = values.new_zeros((slots, capacity))
        self._edit_ids[:, :old] = ids
        self._edit_values[:, :old] = values

    def _send(self, source: Tensor, target: Tensor) -> None:
        """Copy without waiting. Pinned memory comes from torch's cache, which does not hand it out again before the
        copy is done."""
        if self.device.type == "cuda":
            source = source.pin_memory()
        target.copy_(source, non_blocking=True)


def _expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {dtype} {list(shape)}, "
            f"got {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"
        )
