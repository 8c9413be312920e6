"""A serving process on the scripted engine, for tests that send it signals: ``stub_server.py CONFIG START_S FORMAT``,
where FORMAT is that of the log, "" for one that nobody has set up."""

from __future__ import annotations

import sys
import tempfile
from array import array
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from firsttoken.core.request import EngineRequest
from firsttoken.engine.stub import Fault, StubEngine
from firsttoken.frontend.async_llm import AsyncLLM
from firsttoken.observability.logging import setup_logging
from firsttoken.server.config import ServerConfig
from firsttoken.server.run import restart_policy, run_server
from firsttoken.text.chat_template import ChatTemplate
from tests.support.byte_tokenizer import GENERATION, TEMPLATE, VOCAB_SIZE, byte_tokenizer

# The whole of it: prompts that load tests draw begin with any token.
DEADLY = array("I", [ord("!")]).tobytes()


def script(request: EngineRequest) -> list[int | Fault]:
    """As many x as it wants; the prompt "!" is the engine's death after two."""
    if request.prompt == DEADLY:
        return [ord("x"), ord("x"), Fault(fatal=True, silent=True)]
    return [ord("x")] * request.max_tokens


def engine(start_s: float = 0.0) -> StubEngine:
    return StubEngine(script, vocab_size=VOCAB_SIZE, step_s=0.01, start_s=start_s)


async def launch() -> AsyncLLM:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = byte_tokenizer(Path(folder))
    print("launching", flush=True)
    llm = AsyncLLM(
        engine(float(sys.argv[2])),
        tokenizer=tokenizer,
        chat_template=ChatTemplate(TEMPLATE),
        generation_config=GENERATION,
        model_name="stub",
        launch_engine=engine,
        restarts=restart_policy(CONFIG),
    )
    await llm.start()
    return llm


CONFIG = msgspec.json.decode(sys.argv[1], type=ServerConfig)

if __name__ == "__main__":
    if sys.argv[3]:
        setup_logging("info", json_lines=sys.argv[3] == "json")
    sys.exit(run_server(CONFIG, launch))
