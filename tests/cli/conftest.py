"""An engine that answers from a script, behind the real front end."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from firsttoken.checkpoint import locate
from firsttoken.checkpoint.model_config import GenerationConfig
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.request import EngineRequest
from tests.support.byte_tokenizer import EOS, VOCAB_SIZE, byte_tokenizer

# Without a generation prompt, so that an answer that echoes the prompt is easy to read.
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"


@dataclass
class Stub:
    """What the next engine says, and what was asked of it."""

    EOS = EOS

    script: Callable[[EngineRequest], Sequence[Any]] = lambda request: Stub.say(Stub.prompt_text(request).upper())
    options: dict[str, Any] = field(default_factory=dict)
    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(eos_token_ids=(EOS,)))
    # What the model's file holds, as far as the commands look before they load it.
    tokenizer: object | None = "tokenizer"
    chat_template: str | None = TEMPLATE
    args: list[EngineArgs] = field(default_factory=list)
    requests: list[EngineRequest] = field(default_factory=list)
    engines: list[Any] = field(default_factory=list)

    @staticmethod
    def prompt_text(request: EngineRequest) -> str:
        return bytes(list(array("I", request.prompt))).decode()

    @staticmethod
    def say(text: str) -> Sequence[int]:
        return list(text.encode())


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stub:
    from firsttoken.engine import launch as engine_launch
    from firsttoken.engine.stub import StubEngine
    from firsttoken.frontend.async_llm import AsyncLLM
    from firsttoken.text.chat_template import ChatTemplate

    state = Stub()

    def start_process(args: EngineArgs) -> StubEngine:
        state.args.append(args)

        def script(request: EngineRequest) -> Sequence[Any]:
            state.requests.append(request)
            return state.script(request)

        engine = StubEngine(script, **{"vocab_size": VOCAB_SIZE, **state.options})
        state.engines.append(engine)
        return engine

    async def launch(args: EngineArgs, *, handle: StubEngine) -> AsyncLLM:
        assert (args, handle) == (state.args[-1], state.engines[-1])
        llm = AsyncLLM(
            handle,
            tokenizer=byte_tokenizer(tmp_path),
            chat_template=ChatTemplate(TEMPLATE),
            generation_config=state.generation,
            model_name="stub",
        )
        await llm.start()
        return llm

    def open_checkpoint(model: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(tokenizer=state.tokenizer, chat_template=state.chat_template)

    monkeypatch.setattr(engine_launch, "start_process", start_process)
    monkeypatch.setattr(AsyncLLM, "launch", launch)
    monkeypatch.setattr(locate, "open_checkpoint", open_checkpoint)
    return state
