"""The query of a route that takes few parameters or none."""

from __future__ import annotations

from starlette.requests import Request

from firsttoken.server.errors import bad_request

_SHOWN = 80


def check_query(request: Request, *known: str) -> None:
    """Raises `ApiError` 400 naming the first parameter that the route does not know: it would be ignored."""
    for name in request.query_params:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise bad_request(
                f"Unknown query parameter {name[:_SHOWN]!r} of {request.url.path[:_SHOWN]}: {takes}",
                name,
                "unknown_parameter",
            )
