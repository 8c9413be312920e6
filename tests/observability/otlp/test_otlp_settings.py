"""What is exported, where to and how: options go over the environment, and what is not understood is refused."""

import logging

import pytest

from firsttoken.core.errors import ConfigError
from firsttoken.observability.otlp import settings
from firsttoken.observability.otlp.settings import OtlpSettings, resolve

URL = "http://collector:4318"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": URL}


def test_without_an_endpoint_nothing_is_exported():
    assert resolve(None, None, {}) is None
    assert resolve(None, None, {"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_EXPORTER": "otlp"}) is None


def test_an_option_turns_both_signals_on():
    assert resolve(URL, None, {}) == OtlpSettings("http", "http", URL)
    assert resolve(URL, "grpc", {}) == OtlpSettings("grpc", "grpc", URL)


def test_the_environment_does_too():
    assert resolve(None, None, ENDPOINT) == OtlpSettings("http", "http")
    assert resolve(None, None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": URL}) == OtlpSettings("http", None)
    assert resolve(None, None, {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": URL}) == OtlpSettings(None, "http")
    named = ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf"}
    assert resolve(None, None, named) == OtlpSettings("grpc", "http")


def test_options_go_over_the_environment():
    environ = ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert resolve("http://other:1", "http", environ) == OtlpSettings("http", "http", "http://other:1")


def test_the_environment_switches_signals_off():
    assert resolve(URL, None, {"OTEL_METRICS_EXPORTER": "none"}) == OtlpSettings("http", None, URL)
    assert resolve(URL, None, {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}) is None
    assert resolve(URL, None, {"OTEL_SDK_DISABLED": "true"}) is None


def test_intervals():
    found = resolve(URL, None, {"OTEL_BSP_SCHEDULE_DELAY": "250", "OTEL_METRIC_EXPORT_INTERVAL": "5000"})
    assert (found.spans_every_s, found.metrics_every_s) == (0.25, 5.0)


@pytest.mark.parametrize(
    ("endpoint", "protocol", "environ", "names"),
    [
        ("collector:4318", None, {}, ["otlp_endpoint", "'collector:4318'"]),
        ("ftp://collector", None, {}, ["'ftp://collector'"]),
        ("http://", None, {}, ["'http://'"]),
        ("http://host:99999", None, {}, ["99999"]),
        (None, "grpc", {}, ["--otlp-protocol", "--otlp-endpoint"]),
        (URL, None, {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, ["OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "grpc"]),
        (URL, None, {"OTEL_TRACES_EXPORTER": "zipkin"}, ["OTEL_TRACES_EXPORTER", "zipkin"]),
        (URL, None, {"OTEL_METRIC_EXPORT_INTERVAL": "1.5"}, ["OTEL_METRIC_EXPORT_INTERVAL", "1.5"]),
        (URL, None, {"OTEL_BSP_SCHEDULE_DELAY": "0"}, ["OTEL_BSP_SCHEDULE_DELAY", "'0'"]),
    ],
)
def test_what_is_not_understood_is_refused_with_its_name(endpoint, protocol, environ, names):
    with pytest.raises(ConfigError) as caught:
        resolve(endpoint, protocol, environ)
    assert all(name in str(caught.value) for name in names), caught.value


def test_a_missing_sdk_is_an_error_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(settings, "_MODULES", {"grpc": "no_such.otlp", "http": "neither_this"})
    for protocol, missing in (("grpc", "no_such.otlp"), ("http", "neither_this")):
        with pytest.raises(ConfigError) as caught:
            resolve(URL, protocol, {})
        assert missing in str(caught.value)
        assert "pip install 'firsttoken[otel]'" in str(caught.value)


def test_where_only_the_environment_asks_a_missing_sdk_is_a_warning(monkeypatch, caplog):
    """It may be the environment of a whole machine: serving goes on."""
    monkeypatch.setattr(settings, "_MODULES", {"grpc": "no_such.otlp", "http": "neither_this"})
    with caplog.at_level(logging.WARNING):
        assert resolve(None, None, ENDPOINT) is None
    assert "pip install 'firsttoken[otel]'" in caplog.text


def test_a_temporality_that_is_not_honoured_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        assert resolve(URL, None, {"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "delta"}) is not None
    assert "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE" in caplog.text
