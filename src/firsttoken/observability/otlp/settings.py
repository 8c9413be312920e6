"""Whether, where and how to export: the command line's options first, then OpenTelemetry's environment variables."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from firsttoken.core.errors import ConfigError

log = logging.getLogger(__name__)

Protocol = Literal["grpc", "http"]
INSTALL = "pip install 'firsttoken[otel]'"

# What the environment calls them. http/json is in the specification, and not in OpenTelemetry's Python SDK.
_PROTOCOLS: dict[str, Protocol] = {"grpc": "grpc", "http/protobuf": "http"}
_MODULES = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
    "http": "opentelemetry.exporter.otlp.proto.http",
}
_TRACES, _METRICS = "TRACES", "METRICS"


class OtlpSettings(msgspec.Struct, frozen=True):
    """``traces`` and ``metrics`` are the protocols of the two signals, None where one is not exported. ``endpoint`` is
    the command line's, for both; "" leaves it to the environment, which may name one for each. Times in seconds."""

    traces: Protocol | None
    metrics: Protocol | None
    endpoint: str = ""
    spans_every_s: float = 1.0
    metrics_every_s: float = 60.0


def resolve(endpoint: str | None, protocol: Protocol | None, environ: Mapping[str, str]) -> OtlpSettings | None:
    """None where nothing is exported: no endpoint is given, or the environment switches it off.

    Raises `ConfigError` for what is not understood, and where the SDK is missing that an option asks for. Where only
    the environment asks, which may be that of many programs, a missing SDK is a warning.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        if endpoint:
            log.warning("nothing is exported to %s: OTEL_SDK_DISABLED is true in the environment", endpoint)
        return None
    check_endpoint(endpoint)
    if protocol is not None and not (endpoint or _endpoint(environ, _TRACES) or _endpoint(environ, _METRICS)):
        raise ConfigError("--otlp-protocol says how to export, but not where to: give --otlp-endpoint, too")
    settings = OtlpSettings(
        traces=_protocol(endpoint, protocol, environ, _TRACES),
        metrics=_protocol(endpoint, protocol, environ, _METRICS),
        endpoint=endpoint or "",
        spans_every_s=_milliseconds(environ, "OTEL_BSP_SCHEDULE_DELAY", 1000),
        metrics_every_s=_milliseconds(environ, "OTEL_METRIC_EXPORT_INTERVAL", 60_000),
    )
    wanted = {one for one in (settings.traces, settings.metrics) if one is not None}
    if not wanted or not _installed(wanted, by_option=bool(endpoint)):
        return None
    if settings.metrics and environ.get("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "").lower() in (
        "delta",
        "lowmemory",
    ):
        log.warning("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE is not honoured: metrics are cumulative")
    return settings


def check_endpoint(endpoint: str | None) -> None:
    """Raises `ConfigError` for what is no address of a collector."""
    if endpoint is None:
        return
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            "otlp_endpoint must be a URL as in http://127.0.0.1:4318 (for gRPC usually of port 4317), "
            f"got {endpoint!r:.200}"
        )


def _endpoint(environ: Mapping[str, str], signal: str) -> str:
    own = environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", "")
    return own or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")


def _protocol(
    endpoint: str | None, protocol: Protocol | None, environ: Mapping[str, str], signal: str
) -> Protocol | None:
    """How this signal is exported; None where it is not."""
    exporter = environ.get(f"OTEL_{signal}_EXPORTER", "").strip().lower() or "otlp"
    if exporter == "none" or not (endpoint or _endpoint(environ, signal)):
        return None
    if exporter != "otlp":
        raise ConfigError(f"OTEL_{signal}_EXPORTER={exporter:.80} is not supported: take otlp or none")
    if protocol is not None:
        return protocol
    for name in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if said := environ.get(name, "").strip().lower():
            if said not in _PROTOCOLS:
                raise ConfigError(f"{name}={said:.80} is not supported: take {' or '.join(_PROTOCOLS)}")
            return _PROTOCOLS[said]
    return "http"


def _milliseconds(environ: Mapping[str, str], name: str, default: int) -> float:
    said = environ.get(name, "").strip()
    if said and not (said.isdecimal() and int(said) > 0):
        raise ConfigError(f"{name} must be a whole number of milliseconds above 0, got {said!r:.80}")
    return (int(said) if said else default) / 1000


def _installed(protocols: set[Protocol], *, by_option: bool) -> bool:
    missing = [_MODULES[one] for one in sorted(protocols) if not _found(_MODULES[one])]
    if not missing:
        return True
    text = f"exporting by OTLP needs {' and '.join(missing)}, which is not installed: {INSTALL}"
    if by_option:
        raise ConfigError(text)
    log.warning("nothing is exported: %s (the environment names an OTLP endpoint)", text)
    return False


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent
        return False
