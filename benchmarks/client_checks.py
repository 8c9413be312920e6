"""What the scripts of checks by other projects' clients share. They run in environments that have nothing of ours:

python -m benchmarks.openai_client_checks http://127.0.0.1:8000
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any


class Missing(Exception):
    """The server does not have what the check is about: it is skipped, with this as the reason."""


def missing(error: Exception) -> Exception:
    """What to raise for an error: that the server says it has no such thing, or the error itself."""
    said = ("is not supported", "not implemented here", "does not support tools")
    absent = any(words in str(error) for words in said)
    return Missing(str(error)) if absent else error


def run(client: str, checks: Iterable[Callable[..., str]], *given: Any) -> None:
    """Call each check with what is ``given``, and print one object with what each saw. ``client``: name and version."""
    seen = []
    for check in checks:
        one: dict[str, Any] = {"check": check.__name__}
        try:
            one |= {"ok": True, "saw": check(*given)}
        except Missing as why:
            one |= {"ok": True, "skipped": str(why)}
        except Exception as error:
            one |= {"ok": False, "saw": f"{type(error).__name__}: {error}"[:600]}
        seen.append(one)
    print(json.dumps({"client": client, "checks": seen}))
