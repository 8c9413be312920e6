"""``/v1/responses/{id}``: responses that are kept."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from firsttoken.server.call import caller_of
from firsttoken.server.decode import off_loop
from firsttoken.server.encode import to_json
from firsttoken.server.errors import ApiError, bad_request
from firsttoken.server.query import check_query, whole_number
from firsttoken.server.responses.store import Kept, ResponseStore

MAX_LISTED, LISTED = 100, 20
_SHOWN_ID = 80
_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "message": "msg", "reasoning": "rs"}


_INPUT: msgspec.json.Decoder[str | list[dict[str, Any]]] = msgspec.json.Decoder(str | list[dict[str, Any]])


def input_items(kept: Kept) -> list[dict[str, Any]]:
    """Its own input in the long form, each item with an id and a message's content as parts."""
    given = _INPUT.decode(kept.input)
    items: list[dict[str, Any]] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_long(item, kept.id, index) for index, item in enumerate(items)]


def _long(item: dict[str, Any], response_id: str, index: int) -> dict[str, Any]:
    kind = item.get("type") or "message"
    long = {name: value for name, value in item.items() if value is not None}
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        text: dict[str, Any] = {"type": "input_text", "text": content}
        if item["role"] == "assistant":
            text = {"type": "output_text", "text": content, "annotations": []}
        long["content"] = [text]
    own = {"id": f"{_PREFIXES[kind]}_{response_id.removeprefix('resp_')}{index:x}", "status": "completed"}
    return {**own, **long, "type": kind}


def not_found(id_: str, store: ResponseStore, param: str, *, before: str | None = None) -> ApiError:
    """``before``: the response that goes on from it, which was asked for."""
    shown = id_ if len(id_) <= _SHOWN_ID else id_[:_SHOWN_ID] + "..."
    what = (
        f"No response {shown!r} is kept" if before is None else f"{before!r} goes on from {shown!r}, which is not kept"
    )
    return ApiError(
        404,
        f"{what}: kept are {store.capacity:,} at most, in memory, until {store.age_s / 60:g} minutes after their last "
        "use, and none with store false. Send the whole conversation as input.",
        param=param,
        code="response_not_found" if param == "id" else "previous_response_not_found",
    )


def kept_routes(store: ResponseStore) -> list[Route]:
    """A caller sees what came with his own key, or with none where there are no keys: ids of others do not exist."""
    routes = _Kept(store)
    return [
        Route("/v1/responses/{id}", routes.one, methods=["GET"]),
        Route("/v1/responses/{id}", routes.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/input_items", routes.input_items, methods=["GET"]),
    ]


class _Kept:
    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def one(self, request: Request) -> Response:
        check_query(request)
        return Response(self._found(request).body, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        check_query(request)
        kept = self._found(request)
        self._store.delete(caller_of(request.scope).tenant, kept.id)
        return _json({"id": kept.id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        check_query(request, "limit", "order", "after")
        kept = self._found(request)
        items = await off_loop(len(kept.input), input_items, kept)
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise bad_request(f"order must be asc or desc, got {order!r:.80}", "order")
        if order == "desc":
            items.reverse()
        after = request.query_params.get("after")
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise bad_request(f"after: {after!r:.80} is the id of no item of this response", "after")
            items = items[ids.index(after) + 1 :]
        limit = whole_number(request, "limit", LISTED, MAX_LISTED)
        page = items[:limit]
        return _json(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(items) > limit,
            }
        )

    def _found(self, request: Request) -> Kept:
        id_ = request.path_params["id"]
        kept = self._store.get(caller_of(request.scope).tenant, id_)
        if kept is None:
            raise not_found(id_, self._store, "id")
        return kept


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")
