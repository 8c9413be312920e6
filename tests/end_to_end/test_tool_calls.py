"""Forced calls of a model with random weights, which would say anything: by a real engine, in every way of writing."""

from __future__ import annotations

import json

from firsttoken.core.engine_args import EngineArgs
from firsttoken.frontend.async_llm import AsyncLLM
from firsttoken.server.app import build_app
from firsttoken.server.config import ServerConfig
from tests.server.conftest import Client
from tests.support.byte_tokenizer import EOS
from tests.support.tiny_folder import write_tiny_folder

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if tools %}<tool_call>{{ tools | tojson }}"
    "{% endif %}{% if enable_thinking %}<think>{% endif %}"
)
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
CHOICE = {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in (("get_weather", WEATHER), ("f", CHOICE))
]
ARGUMENTS = {"get_weather": {"city", "days"}, "f": {"x"}}


async def test_forced_calls_are_there_and_right(tmp_path):
    folder = write_tiny_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    llm = await AsyncLLM.launch(EngineArgs(model=str(folder), device="cpu", max_num_seqs=4), in_process=True)
    try:
        for parser, thinks in (("hermes", True), ("llama3", False), ("mistral", False), ("qwen3_coder", False)):
            await ask_for_calls(Client(build_app(llm, ServerConfig(tool_parser=parser)), llm, None), thinks)
    finally:
        await llm.shutdown()


async def ask_for_calls(client: Client, thinks: bool) -> None:
    reply = await client.chat("hi", tools=TOOLS, tool_choice="required", seed=1, enable_thinking=thinks, max_tokens=140)
    assert reply.status == 200, reply.body
    (choice,) = reply.json["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    for call in choice["message"]["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        assert arguments.keys() <= ARGUMENTS[call["function"]["name"]]
        assert arguments.get("x", "a") in ("a", "b")
        assert isinstance(arguments.get("city", ""), str)
    reply = await client.chat("hi", tools=TOOLS, tool_choice="required", max_tokens=5)
    assert (reply.status, reply.error["param"]) == (400, "max_tokens")
