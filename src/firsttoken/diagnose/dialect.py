"""How a server is asked: which extras it takes, and what its events say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

# What Server-Timing (W3C) metrics are called by those who pass requests on, and headers in ms of known proxies.
_PROXY_METRICS = frozenset({"lb", "proxy", "lb-queue", "gateway", "edge"})
_PROXY_HEADERS = ("x-kong-proxy-latency", "x-queue-time")


@dataclass(frozen=True)
class Dialect:
    """Extras beside OpenAI's plain fields. ``usage`` asks for the token counts, ``account`` for them with every event,
    for the server's account of time (firsttoken) and for answers of full length (also vLLM, SGLang). Without ``chat``
    the prompt is a text to go on with: models without a chat template answer nothing else."""

    usage: bool = True
    account: bool = True
    chat: bool = True

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, model: str, prompt: str, max_tokens: int) -> bytes:
        fields: dict[str, Any] = {
            "model": model,
            **({"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        if self.usage:
            fields["stream_options"] = {"include_usage": True}
        if self.account:
            fields |= {"timings": True, "ignore_eos": True}
            fields["stream_options"]["continuous_usage_stats"] = True
        return json.dumps(fields).encode()


CHAT = (Dialect(), Dialect(account=False), Dialect(usage=False, account=False))
"""From the richest on: what refuses one with 400 or 422 is asked in the next."""
COMPLETIONS = tuple(replace(dialect, chat=False) for dialect in CHAT)


@dataclass
class Told:
    """What the events have said so far."""

    finished: bool = False
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    account: dict[str, float] | None = None
    run_queue_ms: float = 0.0

    def read(self, event: Mapping[str, Any]) -> None:
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens = _count(usage.get("prompt_tokens"))
            self.output_tokens = _count(usage.get("completion_tokens"))
            details = usage.get("prompt_tokens_details")
            if isinstance(details, dict):
                self.cached_tokens = _count(details.get("cached_tokens"))
        timings = event.get("timings")
        if isinstance(timings, dict) and "total_ms" in timings:
            self.account = {
                name: float(value)
                for name, value in timings.items()
                if name.endswith("_ms") and isinstance(value, int | float)
            }
            self.run_queue_ms = _run_queue_ms(timings.get("worst_gap"))


def _run_queue_ms(worst_gap: object) -> float:
    """Of the largest gap, the part in which the engine was ready and waited for a processor."""
    parts = worst_gap.get("parts_ms") if isinstance(worst_gap, dict) else None
    waited = parts.get("run_queue") if isinstance(parts, dict) else None
    return float(waited) if isinstance(waited, int | float) and waited > 0 else 0.0


def text_of(event: Mapping[str, Any]) -> tuple[str, bool]:
    """The text that an event brings, and whether it is the answer's (else it is reasoning); "" for none."""
    for choice in _list(event.get("choices")):
        if not isinstance(choice, dict):
            continue
        if isinstance(text := choice.get("text"), str) and text:
            return text, True
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {}
        for name in ("content", "tool_calls"):
            if delta.get(name):
                return str(delta[name]), True
        for name in ("reasoning_content", "reasoning"):
            if delta.get(name):
                return str(delta[name]), False
    return "", False


def finish_of(event: Mapping[str, Any]) -> bool:
    return any(isinstance(one, dict) and one.get("finish_reason") for one in _list(event.get("choices")))


def error_text(raw: bytes) -> str:
    """What an error's body says, shortened; of HTML only that it is HTML."""
    try:
        body = json.loads(raw)
    except ValueError:
        text = " ".join(raw.decode("utf-8", "replace").split())
        return "a page in HTML" if text.lower().startswith(("<!doctype", "<html")) else text[:200]
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:400]


def server_timing(header: str) -> dict[str, float]:
    """Durations in ms by metric, of a ``Server-Timing`` header; metrics without one are left out."""
    found = {}
    for metric in header.split(","):
        name, *parameters = (part.strip() for part in metric.split(";"))
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip().lower() == "dur":
                ms = _number(value.strip().strip('"'))
                if ms is not None:
                    found[name] = ms
    return found


def proxy_ms(headers: Mapping[str, str], first_byte_ms: float, rtt_ms: float) -> float | None:
    """How long a load balancer kept the request, where it stamps that; None where it does not.

    Envoy says how long its upstream took to the first byte: what is left of ``first_byte_ms`` after one round trip of
    ``rtt_ms`` is its own.
    """
    stamped = [ms for name, ms in server_timing(headers.get("server-timing", "")).items() if name in _PROXY_METRICS]
    stamped += [ms for name in _PROXY_HEADERS if (ms := _number(headers.get(name, ""))) is not None]
    upstream = _number(headers.get("x-envoy-upstream-service-time", ""))
    if not stamped and upstream is not None:
        return max(first_byte_ms - rtt_ms - upstream, 0.0)
    return sum(stamped) if stamped else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < 1e9 else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
