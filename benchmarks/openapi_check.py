"""Send a running server what fits its OpenAPI document and what does not, and hold its answers to the document.

    firsttoken serve --chat-template benchmarks/clients/chatml_tools.jinja
    python -m benchmarks.openapi_check http://127.0.0.1:8000 --cases 150

The model should have text and a template of tools, or most of what fits is refused. schemathesis makes so many bodies
and parameters for each route, half of them right and half wrong in one place. No answer may be a server error (but for
a deadline that the request itself set), have a status, a type or a shape that the document does not name, or be a
success where the request broke the schema. Tells of each route, when it has been asked, what came of the right
requests. Exit code 1, with the request, at the first answer that is none of these.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.openapi import from_dict
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

WITHOUT_END = ("/dashboard/live",)
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]


def check(
    url: str, document: dict[str, Any], cases: int, *, routes: Sequence[str] = (), vary: bool = True
) -> Iterator[tuple[str, Counter[int]]]:
    """Of each route its name, once it has been asked, with the statuses of the answers to what fits. ``routes``: these
    paths alone. ``vary``: other cases at each run. Raises at the first fault."""
    schema = from_dict(document)
    schema.config.update(base_url=url)
    for result in schema.get_all_operations():
        operation: Any = result.ok()  # type: ignore[union-attr]  # the document is sound, or this raises
        if operation.path in WITHOUT_END or (routes and operation.path not in routes):
            continue
        takes = operation.body or operation.query or operation.path_parameters
        statuses: Counter[int] = Counter()
        _ask(operation, GenerationMode.POSITIVE, cases if takes else 1, vary, statuses)
        if operation.body or operation.query:  # in a path any text is right
            _ask(operation, GenerationMode.NEGATIVE, cases, vary, Counter())
        yield f"{operation.method.upper()} {operation.path}", statuses


def _ask(operation: Any, mode: Any, cases: int, vary: bool, statuses: Counter[int]) -> None:
    checks = CHECKS if mode is GenerationMode.POSITIVE else [*CHECKS, negative_data_rejection]

    @settings(
        max_examples=cases,
        deadline=None,
        derandomize=not vary,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def one(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy(generation_mode=mode))
        response = case.call(timeout=30)
        late = response.status_code == 504 and isinstance(case.body, dict) and case.body.get("deadline_ms")
        assert response.status_code < 500 or late, (response.status_code, response.content, case.as_curl_command())
        case.validate_response(response, checks=checks)
        statuses[response.status_code] += 1

    one()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", help="of a server without API keys")
    parser.add_argument("--cases", type=int, default=50, help="of each route, right and wrong (default: 50)")
    parser.add_argument("--route", action="append", default=[], metavar="PATH", help="this one alone (may be repeated)")
    options = parser.parse_args(arguments)
    with urllib.request.urlopen(f"{options.url}/openapi.json", timeout=30) as answer:  # noqa: S310  # the caller's
        document = json.load(answer)
    known = set(document["paths"])
    if unknown := [path for path in options.route if path not in known]:
        parser.error(f"--route {unknown[0]} is none of the document's paths: {', '.join(sorted(known))}")
    for route, statuses in check(options.url, document, options.cases, routes=options.route):
        print(json.dumps({"route": route, "right": dict(sorted(statuses.items()))}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
