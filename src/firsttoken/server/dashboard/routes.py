"""``/dashboard``: the page, its files, and the feed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from firsttoken.server.call import CALLER, EVENT_STREAM, Caller, Receive, Scope, Send
from firsttoken.server.dashboard.feed import Feed, Listener, parse_hz
from firsttoken.server.dashboard.static import PAGE, StaticFile, read_files
from firsttoken.server.query import check_query

if TYPE_CHECKING:
    from firsttoken.frontend.async_llm import AsyncLLM


class Dashboard:
    """The routes of one server's live picture. The page is open to all; what it shows is not, where there are keys."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._feed = Feed(llm)
        self._files: dict[str, StaticFile] | None = None

    def routes(self) -> list[Route]:
        return [
            Route("/dashboard", self._page, methods=["GET"]),
            Route("/dashboard/", self._to_page, methods=["GET"]),
            Route("/dashboard/live", self._live, methods=["GET"]),
            Route("/dashboard/static/{name:path}", self._file, methods=["GET"]),
        ]

    def close(self) -> None:
        """End the streams, which would otherwise go on for ever."""
        self._feed.close()

    async def _page(self, request: Request) -> Response:
        return (await self._static())[PAGE].answer(request)

    async def _to_page(self, _: Request) -> Response:
        # The page's addresses are relative to "/dashboard", so that it works behind a proxy's prefix.
        return RedirectResponse("../dashboard", 308)

    async def _file(self, request: Request) -> Response:
        file = (await self._static()).get(request.path_params["name"])
        if file is None:
            raise HTTPException(404)
        return file.answer(request)

    async def _static(self) -> dict[str, StaticFile]:
        if self._files is None:
            self._files = await asyncio.to_thread(read_files)
        return self._files

    async def _live(self, request: Request) -> Response:
        check_query(request, "hz")
        hz = parse_hz(_last(request, "hz"))
        caller = request.scope.get(CALLER)
        return _Stream(self._feed, Listener(hz, caller.tenant if isinstance(caller, Caller) else None))


def _last(request: Request, name: str) -> str | None:
    values = parse_qs(request.url.query, keep_blank_values=True).get(name)
    return values[-1] if values else None


class _Stream(Response):
    """The feed as an event stream, until the reader leaves or the server stops."""

    def __init__(self, feed: Feed, listener: Listener) -> None:
        super().__init__()
        self._feed = feed
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        frames = self._feed.frames(self._listener)
        first = await anext(frames)  # raises before anything is sent, where there is no room
        if scope["method"] == "HEAD":
            self._listener.close()
        watching = asyncio.create_task(self._watch(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
            await send(_event(first))
            async for frame in frames:
                await send(_event(frame))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watching.cancel()
            await frames.aclose()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._listener.close()


def _event(frame: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": b"data: %b\n\n" % frame, "more_body": True}
