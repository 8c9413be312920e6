"""The query of a route that takes few parameters or none."""

from __future__ import annotations

from starlette.requests import Request

from firsttoken.server.errors import bad_request

_SHOWN = 80
_DIGITS = 9


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


def whole_number(request: Request, name: str, default: int, most: int) -> int:
    """The parameter ``name``, ``default`` where it is left out. Raises `ApiError` 400 unless it is 1 to ``most``."""
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) <= _DIGITS and 1 <= int(given) <= most):
        raise bad_request(f"{name} must be a whole number from 1 to {most}, got {given!r:.80}", name)
    return int(given)
