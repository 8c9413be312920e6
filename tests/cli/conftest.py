"""An engine that answers from a script, behind the real front end."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from firsttoken.checkpoint.model_config import GenerationConfig, GGUFVocabulary, TokenizerSpec
from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.request import EngineRequest

EOS = 256
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"


def _byte_spec() -> TokenizerSpec:
    """256 tokens, one a byte, and an end token: token ids of ASCII text are its bytes."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + at) for at, byte in enumerate(hidden)}
    vocabulary = GGUFVocabulary(
        kind="gpt2",
        pre="gpt-2",
        tokens=[letters[byte] for byte in range(256)] + ["<end>"],
        merges=[],
        token_types=[1] * 256 + [3],
        eos_id=EOS,
    )
    return TokenizerSpec(gguf=vocabulary, eos_token="<end>", add_bos=False, add_eos=False)


@dataclass
class Stub:
    """What the next engine says, and what was asked of it."""

    EOS = EOS

    script: Callable[[EngineRequest], Sequence[Any]] = lambda request: Stub.say(Stub.prompt_text(request).upper())
    options: dict[str, Any] = field(default_factory=dict)
    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(eos_token_ids=(EOS,)))
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
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    from firsttoken.engine.stub import StubEngine
    from firsttoken.frontend.async_llm import AsyncLLM
    from firsttoken.text.chat_template import ChatTemplate
    from firsttoken.text.tokenizer import Tokenizer

    state = Stub()

    async def launch(args: EngineArgs, *, in_process: bool = False, **_: Any) -> AsyncLLM:
        state.args.append(args)

        def script(request: EngineRequest) -> Sequence[Any]:
            state.requests.append(request)
            return state.script(request)

        engine = StubEngine(script, **{"vocab_size": 257, **state.options})
        state.engines.append(engine)
        llm = AsyncLLM(
            engine,
            tokenizer=Tokenizer.build(_byte_spec()),
            chat_template=ChatTemplate(TEMPLATE, eos_token="<end>"),
            generation_config=state.generation,
            model_name="stub",
        )
        await llm.start()
        return llm

    monkeypatch.setattr(AsyncLLM, "launch", launch)
    return state
