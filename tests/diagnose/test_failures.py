"""What goes wrong is told in a sentence that says at which phase."""

from __future__ import annotations

import socket

import pytest

from firsttoken.core.errors import ConfigError
from firsttoken.core.tls import client_context
from firsttoken.diagnose.endpoint import Endpoint
from firsttoken.diagnose.errors import ProbeFailed
from firsttoken.diagnose.probe import Ask, Probe
from tests.diagnose.double import Double, listening


def failure(url: str, *, ca_file=None, timeout_s: float = 5.0) -> ProbeFailed:
    endpoint = Endpoint.parse(url)
    context = client_context(None if ca_file is None else str(ca_file)) if endpoint.secure else None
    with pytest.raises(ProbeFailed) as caught:
        Probe(endpoint, context, timeout_s=timeout_s).once(Ask("double", "hi", 8, "test"))
    return caught.value


def test_a_name_without_an_address() -> None:
    error = failure("http://no-such-host.invalid")
    assert error.phase == "dns"
    assert "no address for 'no-such-host.invalid'" in str(error)


def test_a_port_that_nobody_listens_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    error = failure(f"http://127.0.0.1:{port}")
    assert error.phase == "tcp"
    assert f"127.0.0.1 port {port}: Connection refused" in str(error)


def test_a_certificate_that_nobody_vouches_for(certificate) -> None:
    with Double(context=certificate.context).running() as double:
        error = failure(double.url)
    assert error.phase == "tls"
    assert "self-signed certificate" in str(error)
    assert "--ca-file" in str(error)


def test_https_to_a_server_that_speaks_http() -> None:
    with Double().running() as double:
        error = failure(double.url.replace("http:", "https:"))
    assert error.phase == "tls"
    assert "speak TLS" in str(error)


def test_https_to_a_server_that_answers_in_plain() -> None:
    def handle(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with listening(handle) as port:
        error = failure(f"https://127.0.0.1:{port}/proxy/v1")
    assert error.phase == "tls"
    assert f"it does not speak TLS (https): try http://127.0.0.1:{port}/proxy" in str(error)


def test_http_to_a_server_that_speaks_tls(certificate) -> None:
    with Double(context=certificate.context).running() as double:
        error = failure(f"http://127.0.0.1:{double.port}", timeout_s=2)
    assert error.phase == "ttfb"


def test_what_is_not_http() -> None:
    def handle(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"220 mail.example.com ESMTP\r\n")

    with listening(handle) as port:
        error = failure(f"http://127.0.0.1:{port}")
    assert error.phase == "ttfb"
    assert "not HTTP" in str(error)


@pytest.mark.parametrize(
    ("mode", "phase", "words"),
    [
        ("html", "first_token", "text/html came instead of a stream of events"),
        ("json", "first_token", "this endpoint does not stream"),
        ("half", "gaps", "closed the connection after 3 events with text"),
        ("error", "ttfb", "the server answered 500: out of cheese"),
    ],
)
def test_answers_that_are_no_stream(mode: str, phase: str, words: str) -> None:
    with Double(mode=mode).running() as double:
        error = failure(double.url)
    assert error.phase == phase
    assert words in str(error)


def test_a_server_that_never_answers() -> None:
    with Double(mode="silent").running() as double:
        error = failure(double.url, timeout_s=0.2)
    assert error.phase == "ttfb"
    assert "nothing came for 0.2 s" in str(error)


def test_an_error_in_the_stream_and_a_broken_event() -> None:
    word = {"choices": [{"delta": {"content": "hi"}}]}
    with Double(events=[word, {"error": {"message": "out of memory"}}]).running() as double:
        error = failure(double.url)
    assert (error.phase, "out of memory" in str(error)) == ("gaps", True)
    with Double(events=[word, ["no", "object"]]).running() as double:
        error = failure(double.url)
    assert "no JSON object" in str(error)
    with Double(events=[{"choices": []}]).running() as double:
        error = failure(double.url)
    assert (error.phase, "without any text" in str(error)) == ("first_token", True)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.com",
        "ftp://example.com",
        "http://",
        "http://a:b@c",
        "http://a:99999",
        "http://a/?q=1",
        "http://a b",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        Endpoint.parse(url)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://a", "http://a"),
        ("https://a:8443/v1/", "https://a:8443"),
        ("http://[::1]:80/proxy/v1", "http://[::1]/proxy"),
    ],
)
def test_addresses(url: str, text: str) -> None:
    assert str(Endpoint.parse(url)) == text
