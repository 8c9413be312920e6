"""The front ends start a real engine: a tiny random model, in a process and on a thread."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from firsttoken import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from firsttoken.core.errors import CheckpointError

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
OPTIONS = {"model": "random:tiny-llama", "max_model_len": 128, "threads": 1, "quantization": "none", "dtype": "float32"}

IN_A_PROCESS = """
import asyncio, sys
from firsttoken import AsyncEngineArgs, AsyncLLM, SamplingParams
from tests.frontend.test_real_engine import GREEDY, OPTIONS

async def main():
    llm = await AsyncLLM.launch(AsyncEngineArgs(**OPTIONS))
    async for output in llm.generate([1, 2, 3], GREEDY):
        pass
    await llm.shutdown()
    assert "torch" not in sys.modules, "the front end imported torch"
    print(*output.outputs[0].token_ids)

asyncio.run(main())
"""


def test_process_and_thread_give_the_same_tokens_and_only_the_thread_imports_torch():
    child = subprocess.run([sys.executable, "-c", IN_A_PROCESS], capture_output=True, text=True, timeout=100)
    assert child.returncode == 0, child.stderr
    with LLM(**OPTIONS) as llm:
        output = llm.generate([[1, 2, 3]], GREEDY)[0]
    assert [int(token) for token in child.stdout.split()] == output.outputs[0].token_ids
    assert output.outputs[0].text == ""
    assert output.metrics["unaccounted_ms"] == 0


async def test_a_model_that_is_not_there_is_named_at_once():
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="no-such-folder"):
        await AsyncLLM.launch(AsyncEngineArgs(model="./no-such-folder", offline=True))
    with pytest.raises(CheckpointError, match="no-such-folder"):
        LLM("./no-such-folder", offline=True)
    assert time.monotonic() - began < 3, "waited for an engine that was still starting"


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="no_such_option"):
        LLM("smollm2", no_such_option=1)
