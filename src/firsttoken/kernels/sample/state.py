"""What the sampling kernels and their callers agree on: the words of a slot's state, codes and sizes.

A slot's state is one row of float64, so that every parameter, whole numbers included, is exact and one copy sets it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Words of a row of `state` float64 [slots, WORDS].
FLAGS = 0
INVERSE_TEMPERATURE = 1
FARTHEST = 2  # -log(min_p): nats below the largest logit beyond which min_p leaves nothing
TOP_K = 3
TOP_P = 4
PRESENCE = 5
FREQUENCY = 6
REPETITION = 7
SEED_LOW = 8
SEED_HIGH = 9
NUM_PROMPT = 10
MIN_TOKENS = 11
NUM_LOGPROBS = 12
NUM_BIAS = 13
NUM_STOPS = 14
NUM_BAD = 15  # sequences of tokens that must not come to their ends
WORDS = 16

# Bits of the word FLAGS.
RANDOM = 1
HAS_TOP_K = 2
HAS_TOP_P = 4
HAS_BIAS = 8
HAS_MIN_TOKENS = 16
HAS_PENALTIES = 32
HAS_LOGPROBS = 64
HAS_MASK = 128
HAS_ALLOWED = 256
HAS_BAD = 512

# Error codes of a row.
OK = 0
NON_FINITE = 1
ALL_MASKED = 2

MAX_TOP = 20  # alternatives of a position: `SamplingParams` allows no more
TILE = 256  # logits a partial maximum that `partials` leaves
CHUNK = 2048  # logits a program; a row's bits depend on it, so it is the same for every batch
LEVELS = 16  # thresholds that one look at the row compares with
NARROW = 2048  # candidates that may be left after the first look; with more there is a second
LISTED = 8192  # candidates kept in a list; with more the row itself is read
BOUNDS = 8  # words a row of `bounds`


def num_tiles(vocab_size: int) -> int:
    """Partial maxima a row that `partials` leaves."""
    return -(-vocab_size // TILE)


def num_chunks(vocab_size: int) -> int:
    """Programs that share a row."""
    return -(-vocab_size // CHUNK)


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a step's sampling leaves for the host, one entry a row: ``tokens`` and ``errors`` int32 [R] for every live
    row; ``logprobs`` float32 [R], ``ranks`` int32 [R], ``top_ids`` int32 and ``top_logprobs`` float32 [R, MAX_TOP] only
    for rows that asked and have no error (id -1 ends the alternatives). May be pinned host memory."""

    tokens: Tensor
    errors: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    @classmethod
    def allocate(cls, rows: int, device: torch.device | str, *, pinned: bool = False) -> Outputs:
        """Zeroed room for ``rows``; ``pinned`` host memory, which kernels reach too, when the device is "cpu"."""

        def make(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)

        return cls(
            tokens=make(torch.int32, rows),
            errors=make(torch.int32, rows),
            logprobs=make(torch.float32, rows),
            ranks=make(torch.int32, rows),
            top_ids=make(torch.int32, rows, MAX_TOP),
            top_logprobs=make(torch.float32, rows, MAX_TOP),
        )


@dataclass(frozen=True, slots=True)
class Scratch:
    """Room that the kernels of one step share, for up to R rows; a stream's steps follow each other and reuse it.

    ``arrived`` and ``num_found`` int32 [R] are counters that start at 0 and return to it. ``values`` float32 and
    ``indices`` int32 [R, tiles] hold the partial maxima that `partials` makes; ``top`` and ``spread`` float32 [R] the
    largest logit (-inf: the row has an error) and its distance from the mean of the partial maxima; ``bounds`` float64
    [R, BOUNDS] where the search for a threshold stands, ``sums`` float32 [R, chunks, LEVELS] its partial sums,
    ``found`` int32 [R, LISTED] its candidates; ``cut_value`` float32 and ``cut_id`` int32 [R] its result: the last
    token kept; ``scores`` float32 and ``score_ids`` int32 [R, chunks] each chunk's best draw.
    """

    top: Tensor
    spread: Tensor
    values: Tensor
    indices: Tensor
    bounds: Tensor
    sums: Tensor
    found: Tensor
    cut_value: Tensor
    cut_id: Tensor
    scores: Tensor
    score_ids: Tensor
    arrived: Tensor
    num_found: Tensor

    @classmethod
    def allocate(cls, rows: int, vocab_size: int, device: torch.device | str) -> Scratch:
        tiles, chunks = num_tiles(vocab_size), num_chunks(vocab_size)

        def make(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((rows, *shape), dtype=dtype, device=device)

        return cls(
            top=make(torch.float32),
            spread=make(torch.float32),
            values=make(torch.float32, tiles),
            indices=make(torch.int32, tiles),
            bounds=make(torch.float64, BOUNDS),
            sums=make(torch.float32, chunks, LEVELS),
            found=make(torch.int32, LISTED),
            cut_value=make(torch.float32),
            cut_id=make(torch.int32),
            scores=make(torch.float32, chunks),
            score_ids=make(torch.int32, chunks),
            arrived=make(torch.int32),
            num_found=make(torch.int32),
        )


@dataclass(frozen=True, slots=True)
class RichScratch:
    """More room, for rows with masks, edits or log-probabilities: ``work`` float32 [R, V], the edited logits;
    ``counts`` int32 [R, V], zero between steps; ``masks`` int32 [R, ceil(V / 32)], a bit for each token that a row with
    HAS_MASK may choose, the lowest bit first, for a GPU in pinned memory of the host's; per chunk ``masses`` float32
    [R, chunks, 2], ``above`` int32 [R, chunks] and ``best`` int64 [R, chunks, MAX_TOP]."""

    work: Tensor
    counts: Tensor
    masks: Tensor
    masses: Tensor
    above: Tensor
    best: Tensor

    @classmethod
    def allocate(cls, rows: int, vocab_size: int, device: torch.device | str) -> RichScratch:
        chunks = num_chunks(vocab_size)
        pinned = torch.device(device).type == "cuda"
        return cls(
            work=torch.empty((rows, vocab_size), dtype=torch.float32, device=device),
            counts=torch.zeros((rows, vocab_size), dtype=torch.int32, device=device),
            masks=torch.zeros(
                (rows, -(-vocab_size // 32)),
                dtype=torch.int32,
                device="cpu" if pinned else device,
                pin_memory=pinned,
            ),
            masses=torch.empty((rows, chunks, 2), dtype=torch.float32, device=device),
            above=torch.empty((rows, chunks), dtype=torch.int32, device=device),
            best=torch.empty((rows, chunks, MAX_TOP), dtype=torch.int64, device=device),
        )


@dataclass(frozen=True, slots=True)
class Step:
    """The operands of one step's sampling kernels, all contiguous and on one device (but ``out``).

    ``logits`` float32 [R, V], left unchanged. Row i belongs to slot ``slots[i]`` and chooses the token at
    ``positions[i]`` of its request (both int32 [R]; a negative one marks padding, which is passed over). ``table``
    int32 [slots, L] holds the requests' tokens and receives the chosen ones. ``state`` float64 [slots, WORDS];
    ``edit_ids`` int32 and ``edit_values`` float32 [slots, C] hold each slot's bias, followed by the ids that its
    minimum length forbids, ``allowed`` int32 [slots, ceil(V / 32)] a bit for each token that it may choose, ``bad``
    int32 [slots, B] its bad sequences: where each begins in the row, where the last ends, and their tokens. ``values``
    and ``indices`` float32 and int32 [R, P] are maxima of consecutive pieces of the
    row (NaN above all, the lowest index at ties) as the head leaves them, or those of ``scratch``.
    """

    logits: Tensor
    slots: Tensor
    positions: Tensor
    table: Tensor
    state: Tensor
    values: Tensor
    indices: Tensor
    scratch: Scratch
    out: Outputs
    edit_ids: Tensor | None = None
    edit_values: Tensor | None = None
    allowed: Tensor | None = None
    bad: Tensor | None = None
    rich: RichScratch | None = None
    pdl: bool = False

    @property
    def rows(self) -> int:
        return self.logits.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[1]
