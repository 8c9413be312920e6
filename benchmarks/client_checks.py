"""What the scripts of checks by other projects' clients share. They run in environments that have nothing of ours:

python -m benchmarks.openai_client_checks http://127.0.0.1:8000
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
"""What the function ``get_weather`` takes."""
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": WEATHER},
}
CAPITAL: Any = {
    "title": "Capital",
    "description": "A city and its country.",
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"type": "string", "maxLength": 20}},
    "required": ["city", "country"],
    "additionalProperties": False,
}


def called(name: str, arguments: Any) -> str:
    """Checks that this is a call of ``get_weather``, and tells its arguments, which may be given as text."""
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == "get_weather", name
    assert isinstance(found["city"], str), found
    assert len(found["city"]) <= 20, found
    return json.dumps(found)


def held(answer: Any) -> str:
    """Checks that this fits `CAPITAL`, and tells it. It may be given as text."""
    found = json.loads(answer) if isinstance(answer, str) else answer
    assert found.keys() == {"city", "country"}, found
    assert all(isinstance(value, str) and len(value) <= 20 for value in found.values()), found
    return json.dumps(found)


def run(client: str, checks: Iterable[Callable[..., str]], *given: Any) -> None:
    """Call each check with what is ``given``, and print one object with what each saw. ``client``: name and version."""
    seen = []
    for check in checks:
        one: dict[str, Any] = {"check": check.__name__}
        try:
            one |= {"ok": True, "saw": check(*given)}
        except Exception as error:
            one |= {"ok": False, "saw": f"{type(error).__name__}: {error}"[:600]}
        seen.append(one)
    print(json.dumps({"client": client, "checks": seen}))
