"""The routes that say something about the server: models, version, health, metrics. Ordinary Starlette."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from firsttoken.observability.health import State
from firsttoken.observability.kv_dashboard import kv_dashboard
from firsttoken.observability.metrics import CONTENT_TYPE
from firsttoken.server.encode import to_json
from firsttoken.server.query import check_query
from firsttoken.server.state import AppState, model_not_found
from firsttoken.version import __version__

# Its states in which an engine takes requests.
_GOOD = frozenset({"idle", "busy"})


class Readiness(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of the engine, or "draining": then ``running`` requests may go on for ``left_s`` seconds. ``reason``:
    why there is no engine; ``retry_after_s``: when another one is expected, where one is."""

    status: State | Literal["draining"]
    running: int | None = None
    left_s: float | None = None
    reason: str | None = None
    retry_after_s: int | None = None


def meta_routes(state: AppState) -> list[Route]:
    routes = _Meta(state)
    return [
        Route("/v1/models", routes.models, methods=["GET"]),
        Route("/v1/models/{name:path}", routes.model, methods=["GET"]),
        Route("/version", routes.version, methods=["GET"]),
        Route("/metrics", routes.metrics, methods=["GET"]),
        Route("/v1/kv", routes.kv, methods=["GET"]),
        Route("/health", routes.live, methods=["GET"]),
        Route("/ping", routes.live, methods=["GET"]),  # SageMaker's name for it
        Route("/health/live", routes.live, methods=["GET"]),
        Route("/health/ready", routes.ready, methods=["GET"]),
        Route("/health/progress", routes.progress, methods=["GET"]),
    ]


class _Meta:
    def __init__(self, state: AppState) -> None:
        self._state = state
        self._llm = state.llm
        self._rendering: asyncio.Task[bytes] | None = None

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._llm.model_name:
            raise model_not_found(name, self._llm.model_name)
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        llm = self._llm
        return {
            "id": llm.model_name,
            "object": "model",
            "created": int(llm.created),
            "owned_by": "firsttoken",
            "max_model_len": llm.info.max_model_len,
            "self_check": llm.info.self_check,
        }

    async def version(self, _: Request) -> Response:
        return _json({"version": __version__})

    async def metrics(self, _: Request) -> Response:
        """All who ask while an answer is made get that one: to make it takes tens of milliseconds of a thread, and each
        thread more makes the event loop wait longer for the interpreter."""
        if self._rendering is None or self._rendering.done():
            self._rendering = asyncio.create_task(asyncio.to_thread(self._llm.metrics.render))
        text = await asyncio.shield(self._rendering)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def kv(self, request: Request) -> Response:
        """What the KV cache holds, found and lost, for a dashboard."""
        check_query(request)
        llm = self._llm
        return _json(kv_dashboard(llm.info, llm.stats, llm.kv_report))

    async def live(self, _: Request) -> Response:
        """Alive until the engine is dead for good: servers that drain, are busy or start their engine again live."""
        state = self._llm.progress().state
        return _json({"status": state}, 503 if state == "dead" else 200)

    async def ready(self, _: Request) -> Response:
        """Whether new requests should be sent here, and why not."""
        llm, state = self._llm, self._llm.progress().state
        if llm.is_draining:
            told = Readiness("draining", running=len(self._state.live), left_s=round(llm.drain_left_s, 1))
            return _json(told, 503)
        if (error := llm.error) is None:
            return _json(Readiness(state), 200 if state in _GOOD else 503)
        retry = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
        return _json(Readiness(state, reason=str(error), retry_after_s=error.retry_after_s), 503, retry)

    async def progress(self, _: Request) -> Response:
        """The step heartbeat: "busy" and "stuck" differ by the age of the last step."""
        progress = self._llm.progress()
        return _json(progress, 200 if progress.state in _GOOD else 503)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, media_type="application/json")
