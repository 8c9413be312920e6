"""The ASGI application: hot routes by exact path, everything else through Starlette, keys before both."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from firsttoken.core.errors import FirstTokenError
from firsttoken.observability.audit_file import AuditFile
from firsttoken.server.access import logged
from firsttoken.server.audit import Audit
from firsttoken.server.auth import ApiKeys, refuse
from firsttoken.server.call import App, Handler, Live, Receive, Scope, Send, given_id
from firsttoken.server.chat import ChatRoute
from firsttoken.server.completions import CompletionRoute
from firsttoken.server.config import ServerConfig
from firsttoken.server.dashboard import Dashboard
from firsttoken.server.dialects import dialect_of
from firsttoken.server.errors import ApiError, as_api_error
from firsttoken.server.messages.route import CountTokensRoute, MessagesRoute
from firsttoken.server.meta import meta_routes
from firsttoken.server.openapi import OpenApi
from firsttoken.server.pooling.embeddings import EmbeddingRoute
from firsttoken.server.pooling.score import RerankRoute, ScoreRoute
from firsttoken.server.recorder import Recorder
from firsttoken.server.requests import request_routes
from firsttoken.server.responses.kept import kept_routes
from firsttoken.server.responses.route import ResponsesRoute
from firsttoken.server.responses.store import ResponseStore
from firsttoken.server.state import AppState
from firsttoken.server.tokenization import DetokenizeRoute, TokenizeRoute
from firsttoken.text.answer_formats import AnswerFormats

if TYPE_CHECKING:
    from firsttoken.frontend.async_llm import AsyncLLM

# OpenAI's routes that are not here.
_OPENAI = re.compile(
    r"/v1/(assistants|audio|batches|containers|conversations|evals|files|fine_tuning|images|moderations|"
    r"realtime|responses|threads|uploads|vector_stores|videos)(/|$)"
)

_ANSWERED = "POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages and /v1/embeddings"
# Families of the other routes.
_OTHERS = (
    ", POST /v1/score, /v1/rerank, /tokenize and /detokenize, and GET /v1/models, /v1/requests, /v1/kv, /metrics, "
    "/health, /dashboard, /openapi.json and /version"
)


class FirstTokenApp:
    """The application of one model. `live` knows the calls in progress and `dashboard` those who watch, so that a
    stopping server can end them. ``routes`` are all that it answers, as (method, path); ``formats`` are how the model's
    answers are read. Raises `ConfigError` for a parser that the model cannot have."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        self._audit: Audit | None = None
        if config.audit_log is not None:
            self._audit = Audit(AuditFile(config.audit_log), llm.model_name)
            llm.metrics.registry.register(self._audit.file)
        recorder = Recorder(llm, self._audit)
        formats = AnswerFormats.choose(
            llm.chat_template, llm.tokenizer, tools=config.tool_parser, reasoning=config.reasoning_parser
        )
        state = AppState(llm, config, Live(recorder.keep, content=config.audit_content), formats)
        self.formats = formats
        self.live: Live = state.live
        self.dashboard = Dashboard(llm)
        router = _Router(state, self.dashboard, recorder, self._audit)
        self.routes = router.routes
        self._app: App = router
        if config.api_keys:
            keys = config.named_keys()
            self._app = ApiKeys(self._app, keys, lasting=llm.info.kv_outlives, on_refused=recorder.refused)
        if config.allow_origin:
            self._app = _readable_by(config.allow_origin, self._app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    @property
    def reopen_log(self) -> Callable[[], None] | None:
        """Begins the audit log's file anew, where there is one."""
        return None if self._audit is None else self._audit.file.reopen

    def close(self) -> None:
        """After the last call: what its logs have to write is written."""
        if self._audit is not None:
            self._audit.file.close()


def build_app(llm: AsyncLLM, config: ServerConfig) -> FirstTokenApp:
    """The ASGI app that serves ``llm``. It neither starts nor stops the engine."""
    return FirstTokenApp(llm, config)


def _readable_by(origins: Sequence[str], app: App) -> App:
    """``app`` for pages of ``origins``, too. Outermost: a browser asks whether it may before it sends a key. A stream's
    tokens do not pass it, but where the server has no `WRITE`: its head and its end do."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=("*",),
    )


class _Router:
    def __init__(self, state: AppState, dashboard: Dashboard, recorder: Recorder, audit: Audit | None) -> None:
        self._live = state.live
        self._tell = None if audit is None else audit.other
        self._recorder = recorder
        score, rerank = ScoreRoute(state), RerankRoute(state)
        responses = ResponseStore(state.config.responses_store)
        self._hot: dict[str, Handler] = {
            "/v1/chat/completions": ChatRoute(state),
            "/v1/completions": CompletionRoute(state),
            "/v1/responses": ResponsesRoute(state, responses),
            "/v1/messages": MessagesRoute(state),
            "/v1/messages/count_tokens": CountTokensRoute(state),
            "/v1/embeddings": EmbeddingRoute(state),
            "/v1/score": score,
            "/score": score,
            "/v1/rerank": rerank,
            "/rerank": rerank,
            "/tokenize": TokenizeRoute(state),
            "/detokenize": DetokenizeRoute(state),
        }
        openapi = OpenApi(keys=bool(state.config.api_keys))
        rest = [
            *meta_routes(state),
            *request_routes(state),
            *kept_routes(responses),
            *dashboard.routes(),
            openapi.route(),
        ]
        self.routes = frozenset(
            [("POST", path) for path in self._hot]
            + [(method, one.path_format) for one in rest for method in one.methods or ()]
        )
        self._rest = Starlette(
            routes=rest,
            exception_handlers={
                HTTPException: _http_error,
                ApiError: _api_error,
                # Expected too: Starlette raises on, and the server logs, what only the last handler knows.
                FirstTokenError: _api_error,
                Exception: _api_error,
            },
        )
        self._rest.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._hot.get(scope["path"]) if scope["type"] == "http" else None
        if handler is None:
            await logged(self._rest, scope, receive, send, given_id(scope), self._tell)
        elif scope["method"] == "POST":
            await self._live.run(handler, scope, receive, send)
        else:
            error = _wrong_method(scope["method"], "POST")
            self._recorder.refused(scope, error)
            await refuse(scope, send, error)


def _wrong_method(method: str, allowed: str) -> ApiError:
    return ApiError(
        405,
        f"{method} is not allowed here; use {allowed}",
        code="method_not_allowed",
        headers=[(b"allow", allowed.encode())],
    )


async def _http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    if exc.status_code == 405:
        return _response(request, _wrong_method(request.method, (exc.headers or {}).get("Allow", "another method")))
    path = request.url.path
    shown = f"{request.method} {path if len(path) <= 200 else path[:200] + '...'}"
    known = _OPENAI.match(path) is not None
    message = f"{shown} is not implemented here" if known else f"Unknown path: {shown}"
    message += f"; this server answers {_ANSWERED}" + ("" if known else _OTHERS)
    return _response(request, ApiError(exc.status_code, message, code="unknown_url"))


async def _api_error(request: Request, exc: Exception) -> Response:
    return _response(request, as_api_error(exc))


def _response(request: Request, error: ApiError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error.headers}
    body = dialect_of(request.url.path).error_body(error, given_id(request.scope))
    return Response(body, error.status, headers, media_type="application/json")
