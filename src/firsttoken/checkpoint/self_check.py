"""The reference that a model folder may hold: what the model thought of a few prompts when it was right.

An engine that loads the folder asks the same of itself (`engine.self_check`). The file is plain JSON, some 130 KB.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.checkpoint.json_files import read_bytes
from firsttoken.core.agreement import Guess
from firsttoken.core.errors import CheckpointError, ConfigError

FILE = "self_check.json"
_FORMAT = 1
_MAX_BYTES = 16 << 20
# Logarithms of probabilities as engines tell them: no logits are so far apart, and 1 may come out a little above.
_LEAST, _MOST = -1e6, 0.01


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine farther than this from what the folder's own weights thought does not run these weights."""

    min_top1_agreement: float
    max_kl: float


class Reference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``guesses`` of ``model`` in ``dtype``, its weights as ``quantization`` says: prompt by prompt, of each position
    from ``given`` tokens on, the last token's left out. ``own`` are those of the folder itself when it was made: the
    first tell what its rounding costs, these whether it is whole. Without ``limits`` nothing is refused but what is not
    finite.
    """

    format: int = _FORMAT
    model: str
    quantization: str
    dtype: str
    given: int
    prompts: list[list[int]]
    guesses: list[Guess]
    own: list[Guess]
    limits: Limits | None = None

    def positions(self) -> Iterator[tuple[int, int]]:
        """(prompt, how many of its tokens are known) of each guess."""
        return ((at, known) for at, prompt in enumerate(self.prompts) for known in range(self.given, len(prompt)))


def read_reference(checkpoint: Checkpoint) -> Reference | None:
    """That of the folder that was opened; None where it has none. Raises `CheckpointError` for one that is damaged or
    of another vocabulary."""
    path = Path(checkpoint.path) / FILE
    if checkpoint.source != "folder" or not path.exists():
        return None
    try:
        reference = msgspec.json.decode(read_bytes(path, _MAX_BYTES), type=Reference)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"is no self-check's reference ({error}): make it anew", file=str(path)) from None
    _check(reference, checkpoint.config.vocab_size, str(path))
    return reference


def write_reference(folder: Path, reference: Reference) -> None:
    """Into the folder, whole or not at all. Raises `ConfigError` where it cannot be written."""
    path = folder / FILE
    unfinished = path.with_suffix(".part")
    try:
        unfinished.write_bytes(msgspec.json.encode(reference))
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _check(reference: Reference, vocab_size: int, file: str) -> None:
    def fail(field: str, message: str) -> CheckpointError:
        return CheckpointError(message, file=file, field=field)

    if reference.format != _FORMAT:
        raise fail("format", f"is {reference.format}, and this version reads {_FORMAT}: make the file anew")
    if reference.given < 1:
        raise fail("given", f"must be 1 or more, got {reference.given}")
    for at, prompt in enumerate(reference.prompts):
        if wrong := [token for token in prompt if not 0 <= token < vocab_size]:
            raise fail(f"prompts[{at}]", f"has token {wrong[0]}, and the model {vocab_size} tokens: make it anew")
    expected = sum(1 for _ in reference.positions())
    for field, guesses in (("guesses", reference.guesses), ("own", reference.own)):
        if expected == 0 or len(guesses) != expected:
            raise fail(field, f"has {len(guesses)}, and the prompts {expected} positions: make the file anew")
        for at, guess in enumerate(guesses):
            if problem := _problem(guess, vocab_size):
                raise fail(f"{field}[{at}]", f"{problem}: make the file anew")
    if (limits := reference.limits) is not None and not (0 <= limits.min_top1_agreement <= 1 and limits.max_kl >= 0):
        raise fail("limits", "must ask for an agreement from 0 to 1 and a divergence of 0 or more: make the file anew")


def _problem(guess: Guess, vocab_size: int) -> str | None:
    """What no model could have thought."""
    tokens = [token for token, _ in guess.likeliest]
    if not tokens:
        return "has no likeliest tokens"
    if len(set(tokens)) < len(tokens) or not all(0 <= token < vocab_size for token in tokens):
        return f"must name different tokens of the model's {vocab_size}"
    logprobs = (guess.logprob, *(logprob for _, logprob in guess.likeliest))
    if wrong := [logprob for logprob in logprobs if not _LEAST <= logprob <= _MOST]:
        return f"has {wrong[0]:g}, which is the logarithm of no probability"
    return None
