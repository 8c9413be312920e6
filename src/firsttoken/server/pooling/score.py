"""``POST /v1/score`` and ``/v1/rerank``: how alike texts are, by the cosine of their vectors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from firsttoken.core.pooling import PoolingParams
from firsttoken.frontend.vectors import cosine
from firsttoken.server.call import Call, unique_id
from firsttoken.server.decode import RequestDecoder, decode_texts, off_loop
from firsttoken.server.errors import bad_request
from firsttoken.server.pooling.batch import PoolingBatch
from firsttoken.server.pooling.embeddings import MAX_INPUTS, reply
from firsttoken.server.pooling.schema import PoolingRequest, RerankRequest, ScoreRequest
from firsttoken.server.sampling import whole
from firsttoken.server.state import AppState

_WHOLE = PoolingParams()


class _Scoring:
    """What both routes do."""

    def __init__(self, state: AppState) -> None:
        self._state = state

    def _texts(self, raw: msgspec.Raw, name: str) -> list[str]:
        texts = decode_texts(raw, self._state.prompt_limit, MAX_INPUTS, name=name)
        if not texts:
            raise bad_request(f"{name} is an empty list: send at least one text", name, "empty_prompt")
        return texts

    async def _scores(
        self, call: Call, request: PoolingRequest, left: Sequence[str], right: Sequence[str], params: tuple[str, str]
    ) -> tuple[list[float], int]:
        """Of each of ``right`` with its own of ``left``, or with the only one; and the tokens of all."""
        self._state.check_open()
        self._state.check_model(request.model)
        call.take_id(request.request_id)
        names = [*_names(params[0], len(left)), *_names(params[1], len(right))]
        batch = PoolingBatch(self._state, call, request, names)
        await batch.encode([*left, *right], params[1])
        vectors = await batch.read(_WHOLE)
        ones, others = vectors[: len(left)], vectors[len(left) :]
        if len(ones) == 1:
            ones = ones * len(others)
        return [cosine(one, other) for one, other in zip(ones, others, strict=True)], batch.prompt_tokens


class ScoreRoute(_Scoring):
    """The handler of scores, for one application."""

    def __init__(self, state: AppState) -> None:
        super().__init__(state)
        self._decoder = RequestDecoder(ScoreRequest)

    async def __call__(self, call: Call) -> None:
        body = await call.body(self._state.body_limit)
        request, left, right = await off_loop(len(body), self._decode, body)
        call.response_id = unique_id("score")
        scores, tokens = await self._scores(call, request, left, right, ("text_1", "text_2"))
        await reply(call, request.timings, self._body, call, scores, tokens)

    def _decode(self, body: bytes) -> tuple[ScoreRequest, list[str], list[str]]:
        request = self._decoder.decode(body)
        left, right = self._texts(request.text_1, "text_1"), self._texts(request.text_2, "text_2")
        if len(left) not in (1, len(right)):
            raise bad_request(
                f"text_1 has {len(left)} texts and text_2 {len(right)}: send one for all, or as many", "text_1"
            )
        return request, left, right

    def _body(self, call: Call, scores: list[float], tokens: int) -> dict[str, Any]:
        return {
            "id": call.response_id,
            "object": "list",
            "created": int(time.time()),
            "model": self._state.llm.model_name,
            "data": ({"index": index, "object": "score", "score": score} for index, score in enumerate(scores)),
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


class RerankRoute(_Scoring):
    """The handler of rankings, for one application."""

    def __init__(self, state: AppState) -> None:
        super().__init__(state)
        self._decoder = RequestDecoder(RerankRequest)

    async def __call__(self, call: Call) -> None:
        body = await call.body(self._state.body_limit)
        request, query, documents = await off_loop(len(body), self._decode, body)
        top = whole("top_n", request.top_n) or len(documents)
        if top < 0:
            raise bad_request(f"top_n must be 0 (all) or more, got {top}", "top_n")
        call.response_id = unique_id("rerank")
        scores, tokens = await self._scores(call, request, query, documents, ("query", "documents"))
        # The first of equals stays first.
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top]
        shown = documents if request.return_documents is not False else None
        await reply(call, request.timings, self._body, call, shown, scores, order, tokens)

    def _decode(self, body: bytes) -> tuple[RerankRequest, list[str], list[str]]:
        request = self._decoder.decode(body)
        query, documents = self._texts(request.query, "query"), self._texts(request.documents, "documents")
        if len(query) != 1:
            raise bad_request(f"query must be one text, got {len(query)}", "query")
        return request, query, documents

    def _body(
        self, call: Call, documents: list[str] | None, scores: list[float], order: list[int], tokens: int
    ) -> dict[str, Any]:
        """``documents``: None where they are not to be told again."""
        return {
            "id": call.response_id,
            "model": self._state.llm.model_name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "results": (
                {"index": index}
                | ({} if documents is None else {"document": {"text": documents[index]}})
                | {"relevance_score": scores[index]}
                for index in order
            ),
        }


def _names(param: str, count: int) -> list[str]:
    return [param] if count == 1 else [f"{param}[{index}]" for index in range(count)]
