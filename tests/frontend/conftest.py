from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from firsttoken.engine.stub import Script, StubConfig, StubEngine
from firsttoken.frontend.async_llm import AsyncLLM
from firsttoken.text.chat_template import ChatTemplate
from firsttoken.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import GENERATION, TEMPLATE, VOCAB_SIZE, byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def serve(tokenizer: Tokenizer) -> AsyncIterator[Callable[..., object]]:
    """Makes a started AsyncLLM around a stub with a given script; stops it afterwards."""
    made: list[AsyncLLM] = []

    async def make(script: Script, *, engine: object = None, text: bool = True, **options: object) -> AsyncLLM:
        handle = engine or StubEngine(script, StubConfig(vocab_size=VOCAB_SIZE), **options)
        llm = AsyncLLM(
            handle,
            tokenizer=tokenizer if text else None,
            chat_template=ChatTemplate(TEMPLATE) if text else None,
            generation_config=GENERATION,
            seed=0,
        )
        made.append(llm)
        await llm.start()
        return llm

    yield make
    for llm in made:
        await llm.shutdown()
