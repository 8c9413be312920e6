"""How one request wants its tokens chosen. Names and defaults follow vLLM's ``SamplingParams``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.grammar import Grammar
from firsttoken.core.structured_outputs import StructuredOutputsParams, structured_outputs_of

# Below this a temperature only makes numbers overflow: it is treated as greedy, as vLLM does.
GREEDY_BELOW = 1e-5
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_N = 128
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS, MAX_BAD_WORD_TOKENS = 64, 128, 128
MAX_SEED = 2**63


def _in_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    # `not (a <= x <= b)` and not `x < a or x > b`: NaN must fail too.
    ok = (low < value <= high) if open_low else (low <= value <= high)
    if not ok:
        bracket = "(" if open_low else "["
        raise InvalidRequest(f"{name} must be in {bracket}{low}, {high}], got {value!r}", param=name)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Frozen, validated when built, and sent to the engine as it is.

    ``temperature`` 0 means greedy; ``top_k`` 0 or -1 means all tokens; ``max_tokens`` None means up to the model's
    length, 0 that the prompt is computed and nothing generated. ``prompt_logprobs`` asks for the log-probability of
    each token of the prompt, and of so many others in its place. ``truncate_prompt_tokens`` cuts it to so many, its
    last (-1: to what fits). ``stop`` strings end the text before they appear in it; ``stop_token_ids`` end it after
    that token. ``seed`` fixes the random numbers of the request whatever else is in the batch. ``grammar`` is what the
    text must look like; ``structured_outputs`` says it in vLLM's words and becomes ``grammar``. Only
    ``allowed_token_ids`` can be chosen, and none that would complete one of ``bad_words`` in the output, which the
    front end spells as ``bad_words_token_ids``. Raises `InvalidRequest`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    grammar: Grammar | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        set_field = msgspec.structs.force_setattr
        if self.structured_outputs is not None:
            if self.grammar is not None:
                raise InvalidRequest(
                    "grammar and structured_outputs say the same: give one of them", param="structured_outputs"
                )
            set_field(self, "grammar", structured_outputs_of(self.structured_outputs).as_grammar())
            set_field(self, "structured_outputs", None)
        set_field(self, "stop", _as_stops(self.stop))
        set_field(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.allowed_token_ids is not None:
            set_field(self, "allowed_token_ids", tuple(dict.fromkeys(self.allowed_token_ids)))
        if self.bad_words is not None:
            set_field(self, "bad_words", _as_words(self.bad_words))
        if self.bad_words_token_ids is not None:
            set_field(self, "bad_words_token_ids", _as_sequences(self.bad_words_token_ids))
        self._check_types()
        self._check_ranges()

    def _check_types(self) -> None:
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidRequest(f"grammar must be a Grammar or None, got {self.grammar!r:.80}", param="grammar")
        for name in ("n", "top_k", "min_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise InvalidRequest(f"{name} must be a whole number, got {value!r}", param=name)
        for name in ("max_tokens", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise InvalidRequest(f"{name} must be a whole number or null, got {value!r}", param=name)
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise InvalidRequest(f"{name} must be a number, got {value!r}", param=name)

    def _check_ranges(self) -> None:
        _in_range("n", self.n, 1, MAX_N)
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise InvalidRequest(
                f"temperature must be a finite number, 0 or more, got {self.temperature!r}", param="temperature"
            )
        _in_range("top_p", self.top_p, 0, 1, open_low=True)
        _in_range("top_k", self.top_k, -1, 2**31 - 1)
        _in_range("min_p", self.min_p, 0, 1)
        _in_range("presence_penalty", self.presence_penalty, -2, 2)
        _in_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _in_range("repetition_penalty", self.repetition_penalty, 0, 1e6, open_low=True)
        if self.seed is not None:
            _in_range("seed", self.seed, -MAX_SEED, MAX_SEED - 1)
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _in_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})", param="min_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _in_range(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.grammar is not None:
            self._check_beside_grammar()
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids is empty: no token could be chosen", param="allowed_token_ids")
        for token, bias in (self.logit_bias or {}).items():
            if not -100 <= bias <= 100:
                raise InvalidRequest(
                    f"logit_bias of token {token} must be in [-100, 100], got {bias!r}", param="logit_bias"
                )

    def _check_beside_grammar(self) -> None:
        """A grammar's end must stay within reach: nothing else may forbid the tokens of the way there."""
        for name in ("allowed_token_ids", "bad_words", "bad_words_token_ids"):
            if getattr(self, name):
                raise InvalidRequest(
                    f"{name} cannot be combined with an answer that is held to a grammar: leave one of them out",
                    param=name,
                )

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, always as a tuple."""
        return self.stop  # type: ignore[return-value]  # normalised in __post_init__

    @property
    def has_penalties(self) -> bool:
        """True when a token's logit depends on the tokens before it."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have; raises `InvalidRequest` naming the field."""
        bad = [token for ids in self.bad_words_token_ids or () for token in ids]
        for name, ids in (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids or ()),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words_token_ids", bad),
        ):
            for token in ids:
                if not isinstance(token, int) or not 0 <= token < vocab_size:
                    raise InvalidRequest(
                        f"{name}: token id {token!r} is outside the vocabulary (0 to {vocab_size - 1})", param=name
                    )

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated again."""
        return msgspec.structs.replace(self, **changes)


def _as_words(words: Sequence[str]) -> tuple[str, ...]:
    if isinstance(words, str) or not all(isinstance(word, str) and word.strip() for word in words):
        raise InvalidRequest("bad_words must be a list of texts that are not blank", param="bad_words")
    longest = max(map(len, words), default=0)
    if len(words) > MAX_BAD_WORDS or longest > MAX_BAD_WORD_CHARS:
        raise InvalidRequest(
            f"bad_words may hold at most {MAX_BAD_WORDS} texts of {MAX_BAD_WORD_CHARS} characters, got {len(words)} of "
            f"up to {longest}",
            param="bad_words",
        )
    return tuple(words)


def _as_sequences(sequences: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Two for each bad word at most, one token a character and one for a space before it."""
    found = tuple(tuple(ids) for ids in sequences)
    if len(found) > 2 * MAX_BAD_WORDS or not all(1 <= len(ids) <= MAX_BAD_WORD_TOKENS for ids in found):
        raise InvalidRequest(
            f"bad_words_token_ids may hold at most {2 * MAX_BAD_WORDS} lists of 1 to {MAX_BAD_WORD_TOKENS} token ids",
            param="bad_words_token_ids",
        )
    return found


def _as_stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stops:
        if not isinstance(text, str) or not text:
            raise InvalidRequest(f"stop must hold non-empty strings, got {text!r}", param="stop")
        if len(text) > MAX_STOP_CHARS:
            raise InvalidRequest(
                f"a stop string may have at most {MAX_STOP_CHARS} characters, got {len(text)}", param="stop"
            )
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop may hold at most {MAX_STOPS} strings, got {len(stops)}", param="stop")
    return stops
