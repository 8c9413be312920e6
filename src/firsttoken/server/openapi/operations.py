"""The routes: what each takes and answers. Whoever adds a route to the application adds it here; a test compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from firsttoken.observability.health import Health, State
from firsttoken.server.messages.schema import CountTokensRequest, MessagesRequest
from firsttoken.server.meta import Readiness
from firsttoken.server.openapi import answers, messages, responses
from firsttoken.server.pooling.schema import EmbeddingRequest, RerankRequest, ScoreRequest
from firsttoken.server.responses.kept import MAX_LISTED
from firsttoken.server.responses.schema import ResponsesRequest
from firsttoken.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest


class Status(msgspec.Struct):
    """The state of the engine."""

    status: State


@dataclass(frozen=True, slots=True)
class Parameter:
    """Of a path or a query. ``schema`` is JSON Schema."""

    name: str
    text: str
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path, ``{name}`` standing for a parameter of it.

    ``takes`` is the struct of its body; ``answer`` that of its JSON, or a media type, or `REDIRECT`. ``event`` is the
    struct of each event where it streams. ``errors`` are statuses with the body of an ``error``, beside 401 where
    there are keys; ``also`` those with the answer's own.
    """

    method: str
    path: str
    summary: str
    tag: str
    answer: type[Any] | str
    takes: type[msgspec.Struct] | None = None
    event: Any = None
    errors: tuple[int, ...] = ()
    error: type[Any] = answers.ErrorResponse
    also: tuple[int, ...] = ()
    path_parameters: tuple[Parameter, ...] = ()
    query: tuple[Parameter, ...] = ()


# Of whatever reads a body: what is wrong with it, with the model's name, its time, its size, its encoding.
_BODY = (400, 404, 408, 413, 415, 429)
# Of whatever asks the engine: a class that the key may not have, too many before it, failed, not there, too late.
_ENGINE = (*_BODY, 403, 500, 503, 504)
_HTML = "text/html"
REDIRECT = "redirect"
_RESPONSE_ID = Parameter("id", "Of the response.", {"type": "string"})

OPERATIONS = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "Answer a conversation",
        "Generation",
        answers.ChatCompletion,
        takes=ChatRequest,
        event=answers.ChatCompletionChunk,
        errors=_ENGINE,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "Continue one or several texts",
        "Generation",
        answers.Completion,
        takes=CompletionRequest,
        event=answers.CompletionChunk,
        errors=_ENGINE,
    ),
    Operation(
        "POST",
        "/v1/responses",
        "Answer a conversation, in items",
        "Generation",
        responses.ResponseObject,
        takes=ResponsesRequest,
        event=responses.ResponseEvent,
        errors=_ENGINE,
    ),
    Operation(
        "GET",
        "/v1/responses/{id}",
        "A response that is kept",
        "Generation",
        responses.ResponseObject,
        errors=(400, 404),
        path_parameters=(_RESPONSE_ID,),
    ),
    Operation(
        "DELETE",
        "/v1/responses/{id}",
        "Keep a response no longer",
        "Generation",
        responses.DeletedResponse,
        errors=(400, 404),
        path_parameters=(_RESPONSE_ID,),
    ),
    Operation(
        "GET",
        "/v1/responses/{id}/input_items",
        "The input of a response that is kept",
        "Generation",
        responses.InputItems,
        errors=(400, 404),
        path_parameters=(_RESPONSE_ID,),
        query=(
            Parameter("limit", "At most so many.", {"type": "integer", "minimum": 1, "maximum": MAX_LISTED}),
            Parameter("order", "By age.", {"enum": ["asc", "desc"]}),
            Parameter("after", "Those behind the item of this id.", {"type": "string"}),
        ),
    ),
    Operation(
        "POST",
        "/v1/messages",
        "Answer a conversation, in blocks",
        "Generation",
        messages.MessageObject,
        takes=MessagesRequest,
        event=messages.MessageEvent,
        errors=_ENGINE,
        error=messages.MessagesError,
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "Count the tokens of its prompt",
        "Tokens",
        messages.TokenCount,
        takes=CountTokensRequest,
        errors=(*_BODY, 503),
        error=messages.MessagesError,
    ),
    Operation(
        "POST",
        "/v1/embeddings",
        "A vector for each text",
        "Vectors",
        answers.Embeddings,
        takes=EmbeddingRequest,
        errors=_ENGINE,
    ),
    *[
        Operation("POST", path, "How alike texts are", "Vectors", answers.Scores, takes=ScoreRequest, errors=_ENGINE)
        for path in ("/v1/score", "/score")
    ],
    *[
        Operation(
            "POST",
            path,
            "Documents by their likeness to a query",
            "Vectors",
            answers.Ranking,
            takes=RerankRequest,
            errors=_ENGINE,
        )
        for path in ("/v1/rerank", "/rerank")
    ],
    Operation(
        "POST",
        "/tokenize",
        "Text or a conversation as token ids",
        "Tokens",
        answers.Tokenized,
        takes=TokenizeRequest,
        errors=(*_BODY, 503),
    ),
    Operation(
        "POST",
        "/detokenize",
        "Token ids as text",
        "Tokens",
        answers.Detokenized,
        takes=DetokenizeRequest,
        errors=_BODY,
    ),
    Operation("GET", "/v1/models", "The model that is served", "Server", answers.ModelList),
    Operation(
        "GET",
        "/v1/models/{name}",
        "The model of that name",
        "Server",
        answers.ModelCard,
        errors=(404,),
        path_parameters=(Parameter("name", "It may hold slashes.", {"type": "string"}),),
    ),
    Operation("GET", "/version", "The server's version", "Server", answers.Version),
    Operation("GET", "/openapi.json", "This document", "Server", dict[str, Any]),
    Operation("GET", "/metrics", "Metrics of both processes for Prometheus", "Observability", "text/plain"),
    Operation(
        "GET", "/v1/kv", "What the KV cache holds, found and lost", "Observability", answers.KVCache, errors=(400,)
    ),
    Operation(
        "GET",
        "/v1/requests",
        "The latest requests that have ended",
        "Observability",
        answers.RequestList,
        errors=(400,),
        query=(Parameter("limit", "At most so many.", {"type": "integer", "minimum": 1, "maximum": 1000}),),
    ),
    Operation(
        "GET",
        "/v1/requests/{id}",
        "Where the time of a request went that has ended",
        "Observability",
        answers.RequestRecord,
        errors=(400, 404),
        path_parameters=(Parameter("id", "`X-Request-Id`, or the `id` of its answer.", {"type": "string"}),),
    ),
    Operation("GET", "/health", "The same as `/health/live`", "Health", Status, also=(503,)),
    Operation("GET", "/ping", "The same as `/health/live`, as SageMaker asks for it", "Health", Status, also=(503,)),
    Operation("GET", "/health/live", "200 until the engine is dead for good", "Health", Status, also=(503,)),
    Operation("GET", "/health/ready", "200 while new requests should be sent here", "Health", Readiness, also=(503,)),
    Operation("GET", "/health/progress", "The heartbeat of the engine's steps", "Health", Health, also=(503,)),
    Operation("GET", "/dashboard", "The live picture, as a page", "Dashboard", _HTML),
    Operation("GET", "/dashboard/", "To the page", "Dashboard", REDIRECT),
    Operation(
        "GET",
        "/dashboard/live",
        "The live picture's feed, without end",
        "Dashboard",
        "text/event-stream",
        event=dict[str, Any],
        errors=(400, 503),
        query=(Parameter("hz", "Events a second at most.", {"type": "number", "minimum": 0.1, "maximum": 10}),),
    ),
    Operation(
        "GET",
        "/dashboard/static/{name}",
        "A file of the page",
        "Dashboard",
        "*/*",
        errors=(404,),
        path_parameters=(Parameter("name", "It may hold slashes.", {"type": "string"}),),
    ),
)
