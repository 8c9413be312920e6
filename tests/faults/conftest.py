"""The server's fixtures, for faults that were seen in other servers (docs/known-faults.md)."""

from __future__ import annotations

import pytest

from firsttoken import AsyncEngineArgs, AsyncLLM
from firsttoken.server.app import build_app
from firsttoken.server.config import ServerConfig
from tests.server.conftest import Client, client, make_client, serve_http, tokenizer

__all__ = ["client", "make_client", "serve_http", "tokenizer"]

TINY = AsyncEngineArgs(
    model="random:tiny-llama", max_model_len=512, max_num_seqs=32, threads=1, quantization="none", dtype="float32"
)


@pytest.fixture
async def real(tokenizer):
    """A server on a real engine of tiny random weights, in this process."""
    async with await AsyncLLM.launch(TINY, in_process=True, tokenizer=tokenizer) as llm:
        yield Client(build_app(llm, ServerConfig()), llm, None)
