"""What the server prints once it is ready: short lines, the last of them to paste into a shell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from firsttoken.core.service import ServiceClass, Targets

WIDTH = 99
CHAT = '{"messages":[{"role":"user","content":"What is the capital of France?"}],"temperature":0}'
TEXT = '{"prompt":"The capital of France is","temperature":0}'
IDS = '{"prompt":[1,2,3],"temperature":0}'


def start_lines(
    title: Sequence[str], facts: Iterable[Sequence[str]], start: tuple[int, Mapping[str, int]]
) -> list[str]:
    """The title, a line (or more, when it gets too long) for each group of facts, and the parts of the start."""
    total, parts = start
    ready = [f"{name} {ms}" for name, ms in parts.items()]
    ready[0] = f"ready after {total} ms: {ready[0]}"
    lines = _filled(title, " ", "", indent="")
    return lines + [line for group in [*facts, ready] for line in _filled(group, ", ", ",")]


def promises(targets: Targets) -> list[str]:
    """What a file promised the classes that it changed, and for how many keys it has rules."""
    words = {"ttft_p99": "first token", "itl_p99": "gap", "max_queue": "queue"}
    found = []
    for service in ServiceClass:
        told, usual = targets.of(service), Targets().of(service)
        if told != usual:
            given = [f"{word} {getattr(told, name):g} ms" for name, word in words.items() if getattr(told, name)]
            given.append(f"start within {told.starts_within / 1000:g} s")
            found.append(f"class {service.label}: {' / '.join(given)}")
    if targets.keys:
        found.append("rules for 1 key" if len(targets.keys) == 1 else f"rules for {len(targets.keys)} keys")
    return found


def try_lines(url: str, path: str, body: str, *, key: bool, trust: str = "") -> list[str]:
    """A curl command, over several lines when it has to be. ``trust``: its options for the server's certificate."""
    words = [f"try: curl -s {url}/v1/{path}", *([trust] if trust else [])]
    if key:
        words.append("-H 'Authorization: Bearer YOUR_KEY'")
    return _filled([*words, f"-d '{body}'"], " ", " \\")


def start_parts(took_ms: float, engine_ms: dict[str, float]) -> tuple[int, dict[str, int]]:
    """The whole start and its parts in whole milliseconds that sum to it: the engine's own account, and under "other"
    what it did not see (the server's own share) or did not name."""
    total = round(took_ms)
    parts = {name: round(ms) for name, ms in engine_ms.items() if name != "other"}
    return total, {**parts, "other": total - sum(parts.values())}


def _filled(words: Sequence[str], between: str, broken: str, indent: str = "  ") -> list[str]:
    """The words on as few lines as hold them; ``broken`` ends a line that goes on."""
    lines = [indent + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(between) + len(word) + len(broken) <= WIDTH:
            lines[-1] += between + word
        else:
            lines[-1] += broken
            lines.append("    " + word)
    return lines
