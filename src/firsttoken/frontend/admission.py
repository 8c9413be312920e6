"""The door: what a caller asks becomes engine requests, or is refused with the numbers."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from firsttoken.core.errors import ConstraintFailed, InvalidRequest
from firsttoken.core.pooling import PoolingKind
from firsttoken.core.random import derive_seed
from firsttoken.core.request import EngineRequest
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import DEFAULT_TERMS, Terms
from firsttoken.core.timeline import Timeline

if TYPE_CHECKING:
    from firsttoken.checkpoint.model_config import GenerationConfig
    from firsttoken.transport.messages import EngineInfo

TOKEN_TYPE = "I"  # uint32, as on the wire  # noqa: S105
_INT64 = 2**63
_SHORT = 1024  # tokens


def token_ids(ids: Iterable[int], *, param: str = "prompt") -> array[int]:
    """The ids as uint32; raises `InvalidRequest` for anything that is not a token id."""
    if isinstance(ids, array) and ids.typecode == TOKEN_TYPE:
        return ids
    checked = array(TOKEN_TYPE)
    for position, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**32:
            raise InvalidRequest(
                f"{param}: {token!r} at position {position} is not a token id (a whole number, 0 or more)", param=param
            )
        checked.append(token)
    return checked


class Admission:
    """Builds the engine requests of one engine: checks, ids, seeds, end tokens.

    Engine ids are counted here and never reused, so two live requests may share a caller's id. Requests without a
    seed draw one from a generator seeded with ``seed`` (None: from the operating system). May be used from several
    threads.
    """

    def __init__(
        self, info: EngineInfo, generation: GenerationConfig, *, has_tokenizer: bool, seed: int | None = None
    ) -> None:
        self._info = info
        self._eos = tuple(dict.fromkeys(generation.eos_token_ids))
        self._has_tokenizer = has_tokenizer
        self._ids = itertools.count(1)
        self._random = random.Random(seed)

    def renew(self, info: EngineInfo) -> None:
        """Another engine takes the place of the one before; ids and seeds go on."""
        self._info = info

    def admit(
        self,
        prompt: array[int],
        params: SamplingParams,
        *,
        timeline: Timeline | None = None,
        terms: Terms = DEFAULT_TERMS,
        pooling: PoolingKind | None = None,
    ) -> list[EngineRequest]:
        """One request for each of the ``params.n`` answers, in order of their index. With ``pooling`` the answer is a
        vector, and ``params`` generate nothing.

        ``max_tokens`` is an upper bound, as in vLLM: it is cut to the room that the prompt leaves in the model's
        length, and None means all of that room. Raises `InvalidRequest`.
        """
        room = self._check_prompt(prompt, generates=params.max_tokens != 0)
        self._check_params(params, room)
        _check_text(terms.salt, "cache_salt")
        if not -_INT64 <= terms.priority < _INT64:
            raise InvalidRequest(f"priority must fit 64 bits, got {terms.priority}", param="priority")
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        stop_ids = self.stop_ids(params)
        raw = prompt.tobytes()
        stamps = timeline.stamps() if timeline is not None else []
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return [
            EngineRequest(
                id=next(self._ids),
                prompt=raw,
                params=params,
                seed=derive_seed(seed, index),
                max_tokens=max_tokens,
                stop_ids=stop_ids,
                salt=terms.salt,
                priority=terms.priority,
                service=terms.service,
                tenant=terms.tenant,
                share=terms.share,
                deadline_ns=terms.deadline_ns,
                retention=terms.retention,
                pooling=pooling,
                stamps=stamps,
            )
            for index in range(params.n)
        ]

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """The ids that end the text: the model's own unless ``ignore_eos``, and always the caller's. A grammar's end
        is the end in any case: nothing may come after it."""
        own = () if params.ignore_eos and params.grammar is None else self._eos
        return tuple(dict.fromkeys((*own, *(params.stop_token_ids or ()))))

    def _check_prompt(self, prompt: array[int], *, generates: bool) -> int:
        """Tokens of output that fit behind the prompt, at least 1 if there is to be any."""
        limit = self._info.max_model_len
        if not prompt:
            raise InvalidRequest("the prompt is empty: give at least one token", param="prompt", code="empty_prompt")
        if len(prompt) > limit and not generates:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens, and the model's context has {limit}: shorten it, or have it cut "
                "to its last ones with truncate_prompt_tokens",
                param="prompt",
                code="context_length_exceeded",
            )
        if len(prompt) >= limit and generates:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens, and the model's context of {limit} tokens must also hold the "
                f"output: shorten the prompt to at most {limit - 1} tokens",
                param="prompt",
                code="context_length_exceeded",
            )
        highest = _highest(prompt)
        if highest >= self._info.vocab_size:
            raise InvalidRequest(
                f"prompt: token id {highest} is outside the vocabulary (0 to {self._info.vocab_size - 1})",
                param="prompt",
            )
        return limit - len(prompt)

    def _check_params(self, params: SamplingParams, room: int) -> None:
        params.check_vocabulary(self._info.vocab_size)
        if params.grammar is not None and not self._has_tokenizer:
            raise InvalidRequest(
                "the model has no tokenizer, so an answer cannot be held to a grammar", param="grammar"
            )
        if params.min_tokens > room:
            raise InvalidRequest(
                f"min_tokens ({params.min_tokens}) is more than the {room} tokens that the prompt leaves in the "
                f"model's context of {self._info.max_model_len}",
                param="min_tokens",
            )
        if params.bad_words:
            raise InvalidRequest("bad_words have not been spelt as tokens: see frontend.bad_words", param="bad_words")
        self._check_choice(params)
        if params.stops and not (params.detokenize and self._has_tokenizer):
            why = "the model has no tokenizer" if params.detokenize else "detokenize is off"
            raise InvalidRequest(f"stop strings cannot be found because {why}: use stop_token_ids", param="stop")
        for stop in params.stops:
            _check_text(stop, "stop")

    def _check_choice(self, params: SamplingParams) -> None:
        """That a token can be chosen, as far as that is known beforehand."""
        if params.grammar is not None:
            return  # it goes before the rest
        never = {ids[0] for ids in params.bad_words_token_ids or () if len(ids) == 1}
        if params.min_tokens:
            never.update(self.stop_ids(params))
        allowed, size = params.allowed_token_ids, self._info.vocab_size
        if allowed is None and len(never) < size:
            return
        if never.issuperset(range(size) if allowed is None else allowed):
            name = "stop_token_ids" if allowed is None else "allowed_token_ids"
            raise InvalidRequest(
                f"{name} leaves no token to choose: min_tokens forbids those that end the answer, and bad_words their "
                "own",
                param=name,
                code=ConstraintFailed.code,
            )


def _highest(prompt: array[int]) -> int:
    """A long prompt may not hold up the event loop; for a short one Python is faster than the way into numpy."""
    return max(prompt) if len(prompt) <= _SHORT else int(np.frombuffer(prompt, np.uint32).max())


def _check_text(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{param} holds a lone surrogate: it must be valid Unicode", param=param) from None
