"""The audit log: a line for each request, which nobody waits for, on a file that is moved and a disk that is full."""

from __future__ import annotations

import asyncio
import json
import os
import threading

import pytest

from firsttoken.core.errors import ConfigError
from firsttoken.core.service import KeyRule, Targets
from firsttoken.observability import audit_file
from firsttoken.observability.audit_file import AuditFile
from firsttoken.server.config import ServerConfig
from firsttoken.server.content import MAX_KEPT
from tests.server.conftest import forever

KEY = {"authorization": "Bearer s3cret", "x-request-id": "mine"}


def config(path, **more) -> ServerConfig:
    keys = Targets(keys={"team": KeyRule()})
    return ServerConfig(api_keys=("team=s3cret", "nameless"), targets=keys, audit_log=str(path), **more)


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


async def written(client) -> None:
    await asyncio.to_thread(client.app.close)


async def test_each_request_is_a_line_without_key_or_text(make_client, tmp_path) -> None:
    path = tmp_path / "audit.jsonl"
    async with make_client(config=config(path)) as client:
        chat = {"messages": [{"role": "user", "content": "private words"}], "n": 2}
        assert (await client.post("/v1/chat/completions", chat, headers=KEY)).status == 200
        assert (await client.post("/v1/completions", {"prompt": "x", "n": 0}, headers=KEY)).status == 400
        assert (await client.post("/v1/completions", {"prompt": "x"})).status == 401
        assert (await client.post("/v1/completions", method="GET", headers=KEY)).status == 405
        other = {"authorization": "Bearer nameless"}
        assert (await client.get("/v1/models?token=private", headers=other)).status == 200
        assert (await client.get("/nope", headers=other)).status == 404
        assert (await client.get("/health")).status == 200
        await written(client)
    first, bad, closed, method, models, unknown = lines(path)
    assert first.items() >= {
        "request_id": "mine", "remote": "test", "key": "team", "method": "POST", "route": "/v1/chat/completions",
        "model": "stub", "outcome": "finished", "status": 200, "error": None, "class": "p2", "answers": 2,
        "output_tokens": 2 * 14,
    }.items()  # fmt: skip
    assert first["prompt_tokens"] > 10
    assert first["ms"] > 0
    assert first["time"].endswith("+00:00")
    assert first["response_id"].startswith("chatcmpl")
    assert (bad["status"], bad["outcome"], bad["answers"], bad["key_id"]) == (400, "refused", 0, first["key_id"])
    assert (closed["status"], closed["key"], closed["key_id"], closed["error"]) == (401, None, None, "invalid_api_key")
    assert (method["status"], method["error"]) == (405, "method_not_allowed")
    assert (models["route"], models["key"], models["outcome"]) == ("/v1/models", None, "finished")
    assert models["key_id"] not in (None, first["key_id"])
    assert (unknown["status"], unknown["outcome"]) == (404, "refused")
    raw = path.read_text()
    assert not [word for word in ("private", "s3cret", "nameless") if word in raw]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_and_answers_are_in_it_where_asked_for(make_client, tmp_path, stream: bool) -> None:
    path = tmp_path / "audit.jsonl"
    async with make_client(config=config(path, audit_content=True)) as client:
        body = {"prompt": "private words", "stream": stream}
        reply = await client.post("/v1/completions", body, headers=KEY)
        long = {"prompt": "x" * (MAX_KEPT + 10)}
        assert (await client.post("/tokenize", long, headers=KEY)).status == 400
        await written(client)
    first, second = lines(path)
    assert json.loads(first["request"]) == body
    assert first["answer"].encode() == reply.body
    assert (first["cut"], second["cut"]) == (False, True)
    assert len(second["request"]) == MAX_KEPT


async def test_a_caller_who_leaves_is_in_it(make_client, tmp_path) -> None:
    path = tmp_path / "audit.jsonl"
    async with make_client(forever, config(path), step_s=0.001) as client:
        exchange = client.start("/v1/completions", {"prompt": "x", "max_tokens": 4000, "stream": True}, headers=KEY)
        await exchange.first_byte.wait()
        exchange.leave()
        await exchange.task
        await written(client)
    [line] = lines(path)
    assert (line["outcome"], line["status"]) == ("aborted", 200)
    assert 0 < line["output_tokens"] < 4000


# ------------------------------------------------------------------------ the file


def _figures(file: AuditFile) -> dict[str, float]:
    return {
        sample.labels.get("why", "written"): sample.value
        for family in file.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def test_a_file_that_was_moved_is_begun_anew(tmp_path) -> None:
    path = tmp_path / "audit.jsonl"
    file = AuditFile(str(path))
    file.add({"n": 1})
    _wait_for(lambda: _figures(file)["written"] == 1)
    path.rename(tmp_path / "audit.jsonl.1")
    file.add({"n": 2})
    _wait_for(lambda: _figures(file)["written"] == 2)
    path.rename(tmp_path / "audit.jsonl.2")
    path.write_text('{"n": "new"}\n')  # as logrotate's "create" does
    file.reopen()
    file.add({"n": 3})
    file.close()
    found = [[one["n"] for one in lines(tmp_path / f"audit.jsonl{end}")] for end in (".1", ".2", "")]
    assert found == [[1], [2], ["new", 3]]


def test_a_full_disk_costs_records_and_nothing_else(tmp_path, monkeypatch, caplog) -> None:
    path = tmp_path / "audit.jsonl"
    file = AuditFile(str(path))
    room = [5]
    write = os.write

    def full(descriptor: int, data) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        taken, room[0] = min(room[0], len(data)), max(0, room[0] - len(data))
        return write(descriptor, bytes(data[:taken]))

    with monkeypatch.context() as patched:
        patched.setattr(audit_file.os, "write", full)
        file.add({"n": 1})
        _wait_for(lambda: _figures(file)["disk"] == 1)
    file.add({"n": 2})
    file.close()
    torn, *whole = path.read_bytes().splitlines()
    assert torn == b'{"n":'
    assert [json.loads(line) for line in whole] == [{"n": 2}]
    assert "No space left" in caplog.text


def test_more_than_can_be_written_is_dropped_counted_and_said(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(audit_file, "MAX_RECORDS", 3)
    monkeypatch.setattr(audit_file, "MAX_BYTES", 10_000)
    file = AuditFile(str(tmp_path / "audit.jsonl"))
    gate, written = threading.Event(), file._write

    def slow(batch, *, reopen):
        gate.wait(5)
        written(batch, reopen=reopen)

    monkeypatch.setattr(file, "_write", slow)
    file.add({"n": 0})
    _wait_for(lambda: not file._waiting)
    for number in range(1, 6):
        file.add({"n": number}, size=10_001 if number == 1 else 0)
    gate.set()
    file.close()
    file.add({"n": "late"})
    assert [one["n"] for one in lines(tmp_path / "audit.jsonl")] == [0, 2, 3, 4]
    assert _figures(file) == {"written": 4, "full_queue": 3, "disk": 0}
    assert "2 records were dropped" in caplog.text


def test_a_file_that_cannot_be_written_is_told_at_the_start(tmp_path) -> None:
    for path in (tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(ConfigError, match="--audit-log"):
            audit_file.check_writable(str(path))
    with pytest.raises(ConfigError, match="--audit-log"):
        ServerConfig(audit_content=True)


def _wait_for(done) -> None:
    for _ in range(2000):
        if done():
            return
        threading.Event().wait(0.001)
    pytest.fail("it was not written")
