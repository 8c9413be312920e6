"""The prompt cache as callers and operators see it."""

from __future__ import annotations

import re

import pytest

from firsttoken.core.errors import ConfigError
from firsttoken.engine.stub import StubEngine
from firsttoken.frontend.async_llm import AsyncLLM
from firsttoken.server.config import ServerConfig
from firsttoken.text.chat_template import ChatTemplate
from firsttoken.text.prompt_templates import PromptTemplate
from tests.server.conftest import TEMPLATE, say
from tests.support.byte_tokenizer import VOCAB_SIZE

CHAT = [{"role": "system", "content": "Be a patient clerk. " * 50}, {"role": "user", "content": "Hi"}]


def counts(metrics: bytes) -> dict[str, float]:
    found = re.findall(r"^firsttoken_prompt_cache_(\S+) (\S+)$", metrics.decode(), re.MULTILINE)
    return {name: float(value) for name, value in found}


async def test_a_chat_that_came_before_is_found_by_its_sender_alone(make_client) -> None:
    async with make_client(say("ok"), config=ServerConfig(api_keys=("gold", "lead"))) as client:

        async def ask(key: str, path: str = "/v1/chat/completions", **fields: object) -> dict[str, float]:
            headers = {"authorization": f"Bearer {key}"}
            reply = await client.post(path, {"messages": CHAT, **fields}, headers=headers)
            assert reply.status == 200, reply.body
            return counts((await client.get("/metrics", headers=headers)).body)

        first = await ask("gold")
        assert first['pieces_total{result="hit"}'] == 0
        assert first["entries"] == 1
        assert first["bytes"] > len(CHAT[0]["content"])
        other = await ask("lead")
        assert other['pieces_total{result="hit"}'] == 0
        own_salt = await ask("gold", cache_salt="mine")
        assert own_salt['pieces_total{result="hit"}'] == 0
        again = await ask("gold")
        assert again['pieces_total{result="hit"}'] == 1
        assert again['characters_total{result="hit"}'] > len(CHAT[0]["content"])
        counted = await ask("gold", "/tokenize")
        assert counted['pieces_total{result="hit"}'] == 2


async def test_the_salt_is_no_template_variable(make_client) -> None:
    async with make_client(say("ok")) as client:
        body = {"messages": CHAT, "chat_template_kwargs": {"cache_salt": "x"}}
        reply = await client.post("/v1/chat/completions", body)
        assert reply.status == 400
        assert reply.json["error"]["param"] == "chat_template_kwargs.cache_salt"


async def test_a_prompt_template_that_the_model_refuses_ends_the_start(tokenizer) -> None:
    begin = PromptTemplate("--prompt-templates x, line 3", [{"role": "user", "content": "boom"}], None, {})
    llm = AsyncLLM(
        StubEngine(say("ok"), vocab_size=VOCAB_SIZE),
        tokenizer=tokenizer,
        chat_template=ChatTemplate(TEMPLATE),
        prompt_templates=[begin],
    )
    with pytest.raises(ConfigError, match="line 3: the chat template refuses these messages: no boom here"):
        await llm.start()
    with pytest.raises(RuntimeError, match="not started"):
        llm.info  # noqa: B018
