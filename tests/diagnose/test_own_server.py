"""Our own server behind TLS: its account joins the client's phases."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import asynccontextmanager

import pytest

from firsttoken import AsyncEngineArgs, AsyncLLM
from firsttoken.core.tls import client_context
from firsttoken.diagnose.endpoint import Endpoint
from firsttoken.diagnose.probe import Probe
from firsttoken.diagnose.references import Reference
from firsttoken.diagnose.report import Targets, diagnosis
from firsttoken.diagnose.session import Session, SessionConfig
from firsttoken.server.app import build_app
from firsttoken.server.config import ServerConfig
from firsttoken.server.run import _Uvicorn, _uvicorn_config
from tests.support.certificate import Certificate

pytestmark = [pytest.mark.model, pytest.mark.clock]


@asynccontextmanager
async def served(key: str, certificate: Certificate):
    """smollm2 on the CPU over TLS, as ``firsttoken serve`` has it: its URL."""
    args = AsyncEngineArgs(model="smollm2", device="cpu", threads=1, max_model_len=512, max_num_seqs=4, offline=True)
    async with await AsyncLLM.launch(args, in_process=True) as llm:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        server = _Uvicorn(_uvicorn_config(build_app(llm, ServerConfig(api_keys=(key,))), certificate.context))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        try:
            yield f"https://localhost:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


async def test_phases_and_account_over_tls(certificate) -> None:
    config = SessionConfig(
        requests=3, pause_ms=5, prompt_tokens=48, max_tokens=12, sweep_prompts=(8, 64), sweep_concurrency=(1, 2),
        repeat=2, sweep_tokens=4,
    )  # fmt: skip
    async with served("s3cret", certificate) as url:
        probe = Probe(Endpoint.parse(url), client_context(str(certificate.file)), "s3cret", 60)
        began = time.monotonic()
        runs = await asyncio.to_thread(Session(probe, config).run)
        wall_ms = (time.monotonic() - began) * 1e3
    assert not runs.failures
    for one in runs.paced:
        assert sum(one.phases.values()) == pytest.approx(one.total_ms, rel=0.01)
        assert one.phases["tls"] > 0
        assert (one.tls.version, one.reused) == ("TLSv1.3", False)
        assert (one.tokens, len(one.chunks)) == (12, 12)
        # What the server says it took is part of what the client waited.
        assert 0.5 * one.total_ms < one.account["total_ms"] < one.total_ms - one.setup_ms
        stages = sum(ms for name, ms in one.account.items() if name != "total_ms")
        assert stages == pytest.approx(one.account["total_ms"], rel=0.01)
        assert one.request_id.startswith("diagnose-")
    assert sum(one.total_ms for one in runs.paced) < wall_ms
    result = diagnosis(runs, Reference(), Targets())
    assert result["server"]["prefill"]["mean"] + result["server"]["decode"]["mean"] > 0.5 * result["e2e_ms"]["mean"]
    assert result["server"]["way"]["mean"] > 0
    assert result["bottleneck"]["layer"] in ("model", "service")
    assert result["sweep"]["decode_ms_per_token"] > 0
