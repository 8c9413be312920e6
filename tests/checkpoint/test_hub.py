"""A hub repository, fetched from a stand-in on 127.0.0.1."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.checkpoint.pooling import choose_pooling
from firsttoken.checkpoint.progress import Progress
from firsttoken.core.errors import CheckpointError
from firsttoken.core.pooling import Pooling

MODULES = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
COMMIT = "c0ffee" * 6 + "c0ff"


class HubStandIn:
    """The part of the hub's protocol that fetching a snapshot uses, for one repository ``owner/tiny``."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.fetched: list[str] = []
        self.revisions = ["main", "v2", COMMIT]
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def log_message(self, *args: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = unquote(urlsplit(request.path).path)
        prefix = f"/owner/tiny/resolve/{COMMIT}/"
        status, headers, content = 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if path.startswith("/api/models/owner/tiny/tree/"):
            entries = [self._entry(name, data) for name, data in self.files.items()]
            status, headers, content = 200, {}, json.dumps(entries).encode()
        elif path == "/api/models/owner/tiny" or (
            path.startswith(revisions := "/api/models/owner/tiny/revision/")
            and path.removeprefix(revisions) in self.revisions
        ):
            self.asked.append(path.rpartition("/")[2])
            siblings = [{"rfilename": name} for name in self.files]
            status, headers = 200, {}
            content = json.dumps({"id": "owner/tiny", "sha": COMMIT, "siblings": siblings}).encode()
        elif path.startswith("/api/models/owner/tiny/revision/"):
            headers = {"X-Error-Code": "RevisionNotFound"}
        elif path.startswith(prefix) and path.removeprefix(prefix) in self.files:
            name = path.removeprefix(prefix)
            status, content = 200, self.files[name]
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
            if body:
                self.fetched.append(name)
        request.send_response(status)
        for key, value in {**headers, "Content-Type": "application/json", "Content-Length": str(len(content))}.items():
            request.send_header(key, value)
        request.end_headers()
        if body:
            request.wfile.write(content)

    @staticmethod
    def _entry(name: str, data: bytes) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@pytest.fixture
def hub(write_folder: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    folder = write_folder(files={"chat_template.jinja": "hello", "tokenizer.json": "{}"})
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    for other in ("pytorch_model.bin", "consolidated.safetensors", "original/params.json", "README.md", "run.py"):
        files[other] = b"never fetched"
    stand_in = HubStandIn(files)
    yield stand_in
    stand_in.server.shutdown()
    stand_in.server.server_close()


def test_a_repository_is_fetched_once_and_works_offline(hub: HubStandIn, tmp_path: Path) -> None:
    seen: list[Progress] = []
    cache = tmp_path / "cache"
    checkpoint = open_checkpoint("owner/tiny", cache=cache, endpoint=hub.url, on_progress=seen.append)
    assert (checkpoint.name, checkpoint.source, checkpoint.chat_template) == ("owner/tiny", "folder", "hello")
    assert checkpoint.tensors.data("model.embed_tokens.weight").shape == (8, 256)
    wanted = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(hub.fetched) == wanted
    size = len(hub.files["model.safetensors"])
    assert any(p.stage == "download" and p.done >= size for p in seen)
    assert all(p.total is None or p.done <= p.total for p in seen)

    again = open_checkpoint("owner/tiny", cache=cache, endpoint=hub.url)
    assert sorted(hub.fetched) == wanted
    hub.server.shutdown()
    hub.server.server_close()
    offline = open_checkpoint("owner/tiny", cache=cache, offline=True)
    assert checkpoint.fingerprint == again.fingerprint == offline.fingerprint


def test_what_says_how_vectors_are_made_is_fetched_from_its_inner_folder(hub: HubStandIn, tmp_path: Path) -> None:
    modules = [{"type": f"sentence_transformers.models.{name}", "path": path} for name, path in MODULES]
    hub.files["modules.json"] = json.dumps(modules).encode()
    hub.files["1_Pooling/config.json"] = b'{"pooling_mode_mean_tokens": true}'
    cache = tmp_path / "cache"
    checkpoint = open_checkpoint("owner/tiny", cache=cache, endpoint=hub.url)
    assert choose_pooling("auto", checkpoint) == Pooling("mean", normalize=True)
    assert "original/params.json" not in hub.fetched
    offline = open_checkpoint("owner/tiny", cache=cache, offline=True)
    assert choose_pooling("auto", offline) == Pooling("mean", normalize=True)


def test_weights_of_a_model_that_cannot_be_served_are_not_fetched(hub: HubStandIn, tmp_path: Path) -> None:
    hub.files["config.json"] = hub.files["config.json"].replace(b"LlamaForCausalLM", b"OtherForCausalLM")
    with pytest.raises(CheckpointError, match="OtherForCausalLM"):
        open_checkpoint("owner/tiny", cache=tmp_path / "cache", endpoint=hub.url)
    assert "model.safetensors" not in hub.fetched


def test_a_repository_without_safetensors_says_so(hub: HubStandIn, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(CheckpointError, match="no weights"):
        open_checkpoint("owner/tiny", cache=tmp_path / "cache", endpoint=hub.url)


def test_a_revision_is_asked_for_and_kept_by_its_name(hub: HubStandIn, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    checkpoint = open_checkpoint("owner/tiny", cache=cache, endpoint=hub.url, revision="v2")
    assert checkpoint.name == "owner/tiny"
    assert hub.asked[0] == "v2"
    assert set(hub.asked) <= {"v2", COMMIT}  # what it named stays the same for all files
    assert open_checkpoint("owner/tiny", cache=cache, offline=True, revision="v2").fingerprint == checkpoint.fingerprint
    with pytest.raises(CheckpointError, match="was not fetched before"):
        open_checkpoint("owner/tiny", cache=cache, offline=True)
    with pytest.raises(CheckpointError, match="owner/tiny: has no revision 'v3': name a branch, a tag or a commit"):
        open_checkpoint("owner/tiny", cache=cache, endpoint=hub.url, revision="v3")


def test_what_is_not_of_the_hub_has_no_revision(tmp_path: Path) -> None:
    for model, what in (("random:tiny-llama", "made"), ("smollm2", "alias"), (str(tmp_path), "path on this machine")):
        with pytest.raises(CheckpointError, match=f"revision 'v2' is for repositories of the hub .*{what}"):
            open_checkpoint(model, revision="v2")


def test_an_unknown_repository(hub: HubStandIn, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"owner/other: the hub answers 404: check the name"):
        open_checkpoint("owner/other", cache=tmp_path / "cache", endpoint=hub.url)


def test_offline_without_a_copy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="owner/tiny: was not fetched before"):
        open_checkpoint("owner/tiny", cache=tmp_path / "cache", offline=True)


def test_a_connection_that_breaks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ClientError(Exception):
        """What an HTTP client raises: of no common base but Exception."""

    def broken(*args: Any, **options: Any) -> str:
        raise ClientError("peer closed connection\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    with pytest.raises(CheckpointError, match=r"owner/tiny: cannot be fetched \(peer closed connection\)"):
        open_checkpoint("owner/tiny", cache=tmp_path)


def test_a_hub_that_is_not_there(hub: HubStandIn, tmp_path: Path) -> None:
    hub.server.shutdown()
    hub.server.server_close()
    with pytest.raises(CheckpointError) as told:
        open_checkpoint("owner/tiny", cache=tmp_path / "cache", endpoint=hub.url)
    assert str(told.value) == (
        f"owner/tiny: cannot be fetched from {hub.url} (Connection refused): "
        "check the network, or name a file or folder"
    )
