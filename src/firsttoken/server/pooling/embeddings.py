"""``POST /v1/embeddings``: a vector for each input."""

from __future__ import annotations

import time
from typing import Any

from firsttoken.core.pooling import PoolingParams
from firsttoken.frontend.vectors import Vector, to_base64
from firsttoken.observability.account import server_timing_header
from firsttoken.server.call import Call, unique_id
from firsttoken.server.decode import Prompt, RequestDecoder, decode_prompts, off_loop
from firsttoken.server.encode import in_pieces
from firsttoken.server.errors import bad_request
from firsttoken.server.pooling.batch import PoolingBatch
from firsttoken.server.pooling.schema import EmbeddingRequest
from firsttoken.server.sampling import whole
from firsttoken.server.state import AppState

MAX_INPUTS = 2048
FORMATS = ("float", "base64")
ELSEWHERE = {"prompt": "/v1/embeddings takes input"}


class EmbeddingRoute:
    """The handler of embeddings, for one application."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._decoder = RequestDecoder(EmbeddingRequest, ELSEWHERE, ids="input")

    async def __call__(self, call: Call) -> None:
        state, llm = self._state, self._state.llm
        body = await call.body(state.body_limit)
        request, inputs = await off_loop(len(body), self._decode, body)
        state.check_open()
        state.check_model(request.model)
        if request.encoding_format not in (None, *FORMATS):
            raise bad_request(
                f"encoding_format must be float or base64, got {request.encoding_format!r:.80}", "encoding_format"
            )
        params = PoolingParams(whole("dimensions", request.dimensions), request.normalize)
        params.check_size(llm.info.hidden_size)
        call.take_id(request.request_id)
        names = [f"input[{index}]" for index in range(len(inputs))] if len(inputs) > 1 else ["input"]
        batch = PoolingBatch(state, call, request, names)
        await batch.encode(inputs, "input")
        call.response_id = unique_id("embd")
        vectors = await batch.read(params)
        await reply(call, request.timings, self._body, call, request, vectors, batch.prompt_tokens)

    def _decode(self, body: bytes) -> tuple[EmbeddingRequest, list[Prompt]]:
        request = self._decoder.decode(body)
        inputs = decode_prompts(request.input, self._state.prompt_limit, MAX_INPUTS, name="input")
        if not inputs:
            raise bad_request("input is an empty list: send at least one", "input", "empty_prompt")
        return request, inputs

    def _body(self, call: Call, request: EmbeddingRequest, vectors: list[Vector], prompt_tokens: int) -> dict[str, Any]:
        encoded = request.encoding_format == "base64"
        return {
            "id": call.response_id,
            "object": "list",
            "created": int(time.time()),
            "model": self._state.llm.model_name,
            # One at a time: as numbers of JSON they take ten times what they do here.
            "data": (
                {"object": "embedding", "index": index, "embedding": to_base64(one) if encoded else one.tolist()}
                for index, one in enumerate(vectors)
            ),
            "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens},
        }


async def reply(call: Call, wants_timings: bool | None, make: Any, *args: Any) -> None:
    """Answer with what ``make(*args)`` gives; it may hold iterators for lists, as `encode.in_pieces` says."""
    last = call.last
    assert last is not None
    timings = last.timings() if wants_timings else None

    body = make(*args)
    if timings is not None:
        body["timings"] = timings
    header = [(b"server-timing", server_timing_header(timings or last.stages()).encode())]
    await call.reply(200, in_pieces(body), header)
