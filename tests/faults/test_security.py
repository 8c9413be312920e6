"""Keys, sockets, and what is read from others."""

from __future__ import annotations

import ast
import re
import socket
from pathlib import Path

import pytest

from firsttoken.server.config import ServerConfig
from tests.end_to_end.test_flight import Server

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "firsttoken"


@pytest.mark.parametrize(
    "path",
    [
        *("//v1/chat/completions", "/v1/chat/completions/", "/v1/chat/completions//", "/./v1/chat/completions"),
        *("/v1/../v1/chat/completions", "/V1/chat/completions", "/v1%2fchat/completions", "/api/v1/chat/completions"),
        *(
            "/health/../v1/chat/completions",
            "/dashboard/static/../../v1/chat/completions",
            "/metrics;x",
            "/health?x=/v1",
        ),
    ],
)
async def test_bb50_no_spelling_of_a_path_goes_around_the_key(make_client, path):
    """That each route of the table asks for one: test_api_keys."""
    async with make_client(config=ServerConfig(api_keys=("secret",))) as client:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        for method in ("GET", "POST"):
            reply = await client.post(path, body, method=method)
            if reply.status != 401:  # an open route, or a file that is not there: never an answer
                assert path.startswith(("/health", "/dashboard/static"))
                assert b"choices" not in reply.body
                assert method == "GET"
        assert client.llm.stats.finished == 0


# Module -> names that build objects from bytes, or load code: none may be used on anything.
LOADERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
CALLS = {"recv_pyobj", "send_pyobj", "load_reduce", "unsafe_load", "full_load", "loads_pickle"}

SUSPECT = re.compile("|".join([*LOADERS, *CALLS, r"torch\.load", r"(np|numpy)\.load", r"yaml\.load"]))


def unsafe(source: str) -> list[str]:
    """Lines that import such a module, call such a function, or ``load`` torch, numpy or YAML files in full."""
    found: list[str] = []
    if not SUSPECT.search(source):  # nearly all: to read a file as code takes a thousand times longer
        return found
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").partition(".")[0]]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if called.rpartition(".")[2] in CALLS:
                found.append(f"line {node.lineno}: {called}")
            if called == "torch.load" and keywords.get("weights_only") != "True":
                found.append(f"line {node.lineno}: {called} in full")
            if called in ("np.load", "numpy.load") and keywords.get("allow_pickle", "False") != "False":
                found.append(f"line {node.lineno}: {called} with pickle")
            if called == "yaml.load":
                found.append(f"line {node.lineno}: {called}")
        found += [f"line {node.lineno}: {name}" for name in names if name in LOADERS]
    return found


def test_bb52_nothing_is_unpickled():
    """Neither what comes over a socket nor what lies in a file; benchmarks are no exception."""
    for path in [*SOURCE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        assert not unsafe(path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from dill import loads", "s.recv_pyobj()", "torch.load(x)", "np.load(x, allow_pickle=True)"],
)
def test_bb52_the_check_finds_what_it_should(line):
    assert unsafe(line)
    assert not unsafe("torch.load(x, weights_only=True)\nnp.load(x)\njson.load(x)")


def listening(pids: set[int]) -> set[tuple[str, int]]:
    """Addresses at which the processes listen, of IPv4 and IPv6."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            name = str(link.readlink()) if link.is_symlink() else ""
            if name.startswith("socket:["):
                inodes.add(name[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                host, _, port = fields[1].partition(":")
                found.add((host, int(port, 16)))
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc")
def test_bb52_only_the_http_port_listens_and_rubbish_there_harms_nobody(tmp_path):
    server = Server(tmp_path)
    try:
        assert listening({server.process.pid, server.engine_pid}) == {("0100007F", server.port)}
        for rubbish in (bytes(range(256)) * 64, b"\x80\x04\x95", b"GET / HTTP/1.1\r\n\x00\r\n\r\n", b"\xff" * 100_000):
            with socket.create_connection(("127.0.0.1", server.port), 5) as client:
                client.sendall(rubbish)
                client.shutdown(socket.SHUT_WR)
                while client.recv(65536):
                    pass
        assert server.ask([3, 4, 5], 2)["usage"]["completion_tokens"] == 2
    finally:
        server.process.kill()
        server.process.communicate()
