"""``serve --ssl-certfile``: what a caller of https sees, by every command, and what files are refused."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
import ssl
import subprocess
import time

import pytest

from firsttoken.cli.main import main
from firsttoken.core.errors import ConfigError
from firsttoken.core.tls import client_context
from firsttoken.server import connections, handshake
from firsttoken.server.config import ServerConfig
from firsttoken.server.dashboard.static import FOLDER
from firsttoken.server.protocol import Protocol
from firsttoken.server.run import run_server
from firsttoken.server.tls import curl_trust, server_context
from tests.support.certificate import make_certificate
from tests.support.stub_process import Server


@pytest.fixture(scope="module")
def served(certificate):
    """A process with the loop that `serve` has: its own buffers and TLS are part of what is tested."""
    trusted = client_context(str(certificate.file))
    server = Server(trusted=trusted, ssl_certfile=str(certificate.file), ssl_keyfile=str(certificate.key))
    yield server
    server.end()


def test_answers_and_streams(served):
    assert served.url.startswith("https://")
    assert served.ask("GET", "/health/live").status == 200
    with served.stream(30) as stream:
        rest = stream.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert rest.count(b'"text":"x') >= 20


async def test_a_caller_who_stops_to_read_is_waited_for_and_gets_all(client, serve_http, certificate, monkeypatch):
    """More than the sockets hold. TLS has buffers of its own, for which other limits pause the answer."""
    path, times, pauses = "vendor/uplot/uPlot.iife.min.js", 10, []
    made, paused = Protocol.connection_made, Protocol.pause_writing

    def small(self, transport, *counted):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport, *counted)

    monkeypatch.setattr(Protocol, "connection_made", small)
    monkeypatch.setattr(Protocol, "pause_writing", lambda self: pauses.append(paused(self)))

    def slow(url):
        asked = b"GET /dashboard/static/%b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode()
        with socket.socket() as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            plain.settimeout(10)
            plain.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            context = client_context(str(certificate.file))
            with context.wrap_socket(plain, server_hostname="localhost", suppress_ragged_eofs=False) as caller:
                pauses.clear()  # those of the handshake
                caller.sendall(asked * (times - 1) + asked.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
                end = time.monotonic() + 10
                while not pauses:
                    assert time.monotonic() < end
                    time.sleep(0.01)
                answer = bytearray()
                while piece := caller.recv(1 << 16):
                    answer += piece
        return bytes(answer)

    async with serve_http(client.app, certificate.context) as url:
        answer = await asyncio.to_thread(slow, url)
    assert answer.count(b"HTTP/1.1 200 OK") == answer.count((FOLDER / path).read_bytes()) == times


async def test_who_says_nothing_is_counted_and_hung_up_on(client, serve_http, certificate, monkeypatch):
    """Of three connections two stay until they have had their time; the third is let go at once; then there is room."""
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(connections, "_MOST_TOLD", 0)
    context = client_context(str(certificate.file))
    async with serve_http(client.app, certificate.context, connections.Connections(2)) as url, asyncio.timeout(10):
        port = int(url.rpartition(":")[2])
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        silent[1][1].write(b"\x16\x03\x01\x02\x00")  # the beginning of a hello
        with pytest.raises(OSError, match=r"(?i)eof|reset|closed"):
            await asyncio.open_connection("127.0.0.1", port, ssl=context)
        for reader, writer in silent:
            assert await reader.read() == b""
            writer.close()
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()


def test_an_end_does_not_wait_for_handshakes(certificate):
    server = Server(ssl_certfile=str(certificate.file), ssl_keyfile=str(certificate.key))
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as silent:
        time.sleep(0.05)
        server.signal()
        assert silent.recv(10) == b""
        assert server.wait(10) == 0
        assert "timeout" not in server.said()
    server.end()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_versions_that_are_spoken(served, certificate, version):
    context = client_context(str(certificate.file))
    context.minimum_version = context.maximum_version = version
    with (
        socket.create_connection(("127.0.0.1", served.port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as caller,
    ):
        assert caller.version() == version.name.replace("_", ".")
        assert caller.selected_alpn_protocol() == "http/1.1"


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_older_versions_and_plain_http_are_refused(served, certificate):
    context = client_context(str(certificate.file))
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with (
        socket.create_connection(("127.0.0.1", served.port), timeout=10) as plain,
        pytest.raises(OSError, match=r"(?i)protocol|reset"),
    ):
        context.wrap_socket(plain, server_hostname="localhost")
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as plain:
        plain.sendall(b"GET /health/live HTTP/1.1\r\n\r\n")
        assert b"200" not in plain.recv(1000)
    assert served.ask("GET", "/health/live").status == 200


def test_every_command_trusts_who_is_named(served, certificate, capsys, monkeypatch):
    trust = ["--ca-file", str(certificate.file)]
    assert main(["top", served.url, "--json", *trust]) == 0
    assert json.loads(capsys.readouterr().out)["url"] == served.url
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert main(["chat", "--url", served.url, "--max-tokens", "3", *trust]) == 0
    assert capsys.readouterr().out.strip() == "xxx"
    load = ["--concurrency", "2", "--seconds", "0.1", "--warmup", "0", "--mix", "8:4", "--json"]
    assert main(["bench", "load", served.url, *load, *trust]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["url"], found["requests"]["failed"]) == (served.url + "/v1", 0)
    few = ["--requests", "2", "--max-tokens", "4", "--no-sweep", "--json"]
    assert main(["diagnose", served.url, *few, *trust]) == 0
    assert json.loads(capsys.readouterr().out)["phases"]["tls"]["mean"] > 0


@pytest.mark.parametrize("command", [["top"], ["chat", "--url"], ["bench", "load", "--concurrency", "1"], ["diagnose"]])
def test_who_is_not_known_is_not_trusted(served, capsys, command, tmp_path):
    assert main([*command, served.url]) in (1, 2)
    said = capsys.readouterr().err
    assert "certificate" in said
    assert "--ca-file" in said
    (tmp_path / "empty.pem").touch()
    for file in ("empty.pem", "none.pem"):
        assert main([*command, served.url, "--ca-file", str(tmp_path / file)]) == 2
        assert f"--ca-file {tmp_path / file}" in capsys.readouterr().err


def test_a_caller_cannot_name_whom_to_trust_where_there_is_no_server(capsys):
    assert main(["chat", "--ca-file", "x.pem"]) == 2
    assert "--ca-file goes with --url" in capsys.readouterr().err


def test_the_key_may_be_in_the_certificates_file(certificate, tmp_path):
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.key.read_bytes() + certificate.file.read_bytes())
    both.chmod(0o600)
    assert server_context(ServerConfig(ssl_certfile=str(both))) is not None
    assert server_context(ServerConfig()) is None


def test_files_that_cannot_be_used_are_refused_by_name(certificate, tmp_path):
    (tmp_path / "other").mkdir()
    other = make_certificate(tmp_path / "other")
    locked, broken = tmp_path / "locked.pem", tmp_path / "broken.pem"
    words = ["openssl", "pkey", "-in", str(certificate.key), "-aes256", "-passout", "pass:x", "-out", str(locked)]
    subprocess.run(words, check=True, capture_output=True, timeout=30)
    broken.write_text(certificate.file.read_text().replace("M", "!"))
    cert, key, none = str(certificate.file), str(certificate.key), str(tmp_path / "none.pem")
    for certfile, keyfile, words in (
        (none, key, f"--ssl-certfile {none}: No such file"),
        (cert, none, f"--ssl-keyfile {none}: No such file"),
        (str(tmp_path), key, f"--ssl-certfile {tmp_path}: Is a directory"),
        (key, key, f"--ssl-certfile {key} holds no certificate"),
        (cert, cert, f"--ssl-keyfile {cert} holds no private key"),
        (cert, None, f"--ssl-certfile {cert} holds no private key.*--ssl-keyfile"),
        (cert, str(other.key), f"--ssl-keyfile {other.key} is not the key of the first certificate"),
        (cert, str(locked), f"--ssl-keyfile {locked}: the key is encrypted"),
        (str(broken), key, f"--ssl-certfile {broken} with the key in {key} cannot be used"),
    ):
        with pytest.raises(ConfigError, match=words):
            server_context(ServerConfig(ssl_certfile=certfile, ssl_keyfile=keyfile))
    with pytest.raises(ConfigError, match="is the key of no certificate"):
        ServerConfig(ssl_keyfile=key)


def test_what_curl_needs_to_trust_it(certificate, tmp_path):
    server, path = (
        server_context(ServerConfig(ssl_certfile=str(certificate.file), ssl_keyfile=str(certificate.key))),
        "a b.pem",
    )
    assert server is not None
    (tmp_path / path).write_bytes(certificate.file.read_bytes())
    assert curl_trust(server, str(tmp_path / path), "127.0.0.1") == f"--cacert '{tmp_path / path}'"
    assert curl_trust(server, str(tmp_path / path), "0.0.0.0") == "-k"


def test_nothing_is_needed_for_a_certificate_that_the_system_knows(certificate, monkeypatch):
    server = server_context(ServerConfig(ssl_certfile=str(certificate.file), ssl_keyfile=str(certificate.key)))
    assert server is not None
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))
    assert curl_trust(server, str(certificate.file), "localhost") == ""


def test_a_mistake_is_told_before_an_engine_is_waited_for(certificate):
    async def launch():
        pytest.fail("the engine was waited for")

    with pytest.raises(ConfigError, match="holds no private key"):
        run_server(ServerConfig(port=0, ssl_certfile=str(certificate.file)), launch)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_key_that_everybody_can_read_is_warned_of(certificate, tmp_path, caplog, mode, warned):
    key = tmp_path / "key.pem"
    key.write_bytes(certificate.key.read_bytes())
    key.chmod(mode)
    with caplog.at_level(logging.WARNING):
        server_context(ServerConfig(ssl_certfile=str(certificate.file), ssl_keyfile=str(key)))
    assert (f"--ssl-keyfile {key} can be read by every user" in caplog.text) == warned
