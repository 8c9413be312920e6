"""``GET /v1/requests`` and ``GET /v1/requests/{id}``: where the time of requests went that have ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from firsttoken.core.clock import NS_PER_MS, NS_PER_S
from firsttoken.core.timeline import Mark
from firsttoken.observability.recent import EndedRequest, RecentRequests
from firsttoken.server.call import caller_of
from firsttoken.server.encode import to_json
from firsttoken.server.errors import ApiError
from firsttoken.server.query import check_query, whole_number

if TYPE_CHECKING:
    from firsttoken.server.state import AppState

LATEST = 100
_SHOWN_ID = 200
# An account that nobody has asked for yet takes up to half a millisecond: after so many, others have their turn.
_TURN = 4


def request_routes(state: AppState) -> list[Route]:
    routes = _Requests(state.llm.recent)
    return [
        Route("/v1/requests", routes.latest, methods=["GET"]),
        Route("/v1/requests/{id:path}", routes.one, methods=["GET"]),
    ]


class _Requests:
    """A caller sees what came with his own key, or with none where there are no keys: ids of others do not exist."""

    def __init__(self, recent: RecentRequests) -> None:
        self._recent = recent

    async def latest(self, request: Request) -> Response:
        check_query(request, "limit")
        most = self._recent.capacity
        limit = whole_number(request, "limit", min(LATEST, most), most)
        data = []
        for count, one in enumerate(self._recent.latest(limit, caller_of(request.scope).tenant), 1):
            data.append(shown(one))
            if not count % _TURN:
                await asyncio.sleep(0)
        return Response(to_json({"object": "list", "data": data}), media_type="application/json")

    async def one(self, request: Request) -> Response:
        check_query(request)
        id_ = request.path_params["id"]
        found = self._recent.get(id_, caller_of(request.scope).tenant)
        if found is None:
            raise _unknown(id_, self._recent)
        return Response(to_json(shown(found, whole=True)), media_type="application/json")


def shown(ended: EndedRequest, *, whole: bool = False) -> dict[str, Any]:
    """The record as JSON. ``whole``: with its timeline and the time of each token, in ms since its first byte."""
    record: dict[str, Any] = {
        "id": ended.id,
        "object": "request",
        "response_id": ended.response_id or None,
        "route": ended.route,
        "model": ended.model,
        "service_class": ended.service_class or None,
        "received": ended.received_unix_ns / NS_PER_S,
        "outcome": ended.outcome,
        "status": ended.status or None,
        "error": ended.error or None,
        "finish_reason": ended.finish_reason,
        "answers": len(ended.engine_ids),
        "prompt_tokens": ended.prompt_tokens,
        "output_tokens": ended.output_tokens,
        "ttft_ms": None if ended.ttft_ns is None else ended.ttft_ns / NS_PER_MS,
        "timings": ended.account,
    }
    if whole:
        record["timeline"] = [[Mark(mark).name.lower(), _since(ended, ns)] for mark, ns in ended.timeline]
        record["token_ms"] = [_since(ended, ns) for ns in ended.token_times]
    return record


def _since(ended: EndedRequest, ns: int) -> float:
    return (ns - ended.received_ns) / NS_PER_MS


def _unknown(id_: str, recent: RecentRequests) -> ApiError:
    name = id_ if len(id_) <= _SHOWN_ID else id_[:_SHOWN_ID] + "..."
    return ApiError(
        404,
        f"No ended request {name!r} is known: kept are the last {recent.capacity:,} at most, for "
        f"{recent.age_s / 60:g} minutes after their end.",
        param="id",
        code="request_not_found",
    )
