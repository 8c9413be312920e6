"""How long the way of a streamed token is: counted, not timed, so that it cannot grow unnoticed.

What a token costs in time is `benchmarks/http_costs.py`'s to say.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections import Counter

import pytest
from uvicorn.server import ServerState

import firsttoken
from firsttoken.frontend.async_llm import AsyncLLM
from firsttoken.server.app import build_app
from firsttoken.server.config import ServerConfig
from firsttoken.server.protocol import Protocol
from firsttoken.server.run import _uvicorn_config
from firsttoken.text.chat_template import ChatTemplate
from tests.support.byte_tokenizer import GENERATION, TEMPLATE
from tests.support.driven_engine import DrivenEngine

OURS = firsttoken.__path__[0]
STREAMS, STEPS = 4, 10
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
FORMS = [
    # path, body, most functions of ours that a token may call
    (CHAT, {"messages": MESSAGES}, 13),
    (CHAT, {"messages": MESSAGES, "stop": ["never"]}, 15),
    ("/v1/completions", {"prompt": "hi"}, 12),
    ("/v1/responses", {"input": MESSAGES, "store": False}, 13),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9999}, 13),
]


class Wire:
    """A transport that counts writes."""

    def __init__(self):
        self.writes = 0

    def write(self, data):
        self.writes += 1

    def close(self): ...

    def is_closing(self):
        return False

    def get_extra_info(self, name):
        return None

    def set_write_buffer_limits(self, **limits): ...

    def resume_reading(self): ...


class Calls:
    """Counts the functions of ours that run within it; a coroutine counts each time that it goes on."""

    def __enter__(self):
        self.counts, self.coroutines = Counter(), Counter()
        self._before = sys.getprofile()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_):
        sys.setprofile(self._before)

    def _note(self, frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS):
            self.counts[code.co_qualname] += 1
            if code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
                self.coroutines[code.co_qualname] += 1


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("path", "body", "most"), FORMS)
async def test_a_streamed_token_wakes_no_task_and_is_one_write(tokenizer, path, body, most):
    engine = DrivenEngine()
    llm = AsyncLLM(
        engine, tokenizer=tokenizer, chat_template=ChatTemplate(TEMPLATE), generation_config=GENERATION, model_name="m"
    )
    await llm.start()
    config = _uvicorn_config(build_app(llm, ServerConfig()))
    raw = json.dumps({**body, "stream": True}).encode()
    request = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(raw), raw)
    wires, protocols = [Wire() for _ in range(STREAMS)], []
    for wire in wires:
        protocols.append(Protocol(config, ServerState(), {}, asyncio.get_running_loop()))
        protocols[-1].connection_made(wire)
        protocols[-1].data_received(request)
    async with asyncio.timeout(5):
        while len(engine.ids) < STREAMS:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    for _ in range(2):  # the first begins, and what is made once is made
        engine.step("x")
        await turns(2 * STREAMS + 4)
    before = sum(wire.writes for wire in wires)
    with Calls() as calls:
        for _ in range(STEPS):
            engine.step("x")
            await turns(STREAMS + 1)
    tokens = STREAMS * STEPS
    assert sum(wire.writes for wire in wires) - before == tokens
    woken = [name for name, count in calls.coroutines.items() if count >= STEPS]  # some go by the clock
    assert not woken, "a task was woken for a token or a step"
    a_token = [name for name, count in calls.counts.items() if count >= tokens]
    spent = sum(count for name, count in calls.counts.items() if name in a_token) / tokens
    assert spent <= most, f"{spent} calls a token: {calls.counts.most_common(40)}"
    for protocol in protocols:
        protocol.connection_lost(None)
    await turns(8)
    await llm.shutdown()
