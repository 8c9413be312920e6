"""Chat templates, control tokens and end tokens."""

from __future__ import annotations

import time

import pytest

from firsttoken.checkpoint.model_config import GenerationConfig
from firsttoken.server.config import ServerConfig
from tests.server.conftest import END, forever
from tests.support.byte_tokenizer import BOS

EOT = END + 1


@pytest.mark.parametrize("end", [END, EOT, ord("#")])
async def test_bb21_each_of_several_end_tokens_ends_the_answer(make_client, end):
    """Whatever else the request overrides; only ``ignore_eos`` lets them pass, and the caller's own count even then."""
    ends = GenerationConfig(eos_token_ids=(END, EOT, ord("#")), temperature=0.5)
    async with make_client(lambda request: [*b"ok", end, *b"junk"], generation=ends) as client:
        for override in ({}, {"temperature": 0}, {"top_p": 0.5}, {"stop": ["nothing"]}, {"stop_token_ids": [1]}):
            for reply in (await client.chat(**override), await client.complete(max_tokens=16, **override)):
                choice = reply.json["choices"][0]
                assert choice.get("text", choice.get("message", {}).get("content")) == "ok"
                assert choice["finish_reason"] == "stop"
        own = (await client.complete(ignore_eos=True, stop_token_ids=[ord("n")], max_tokens=16)).json["choices"][0]
        assert own["stop_reason"] == ord("n")
        assert own["text"].startswith("ok")
        assert own["text"].rstrip("n").endswith("ju")


TEMPLATE = "<|bos|>{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{% endfor %}"


async def test_bb22_one_bos_is_written_once_and_counted_once(make_client):
    """Also by a caller who types it, whose text stays text."""
    async with make_client(template=TEMPLATE) as client:
        messages = [{"role": "user", "content": "Hi"}]
        told = (await client.post("/tokenize", {"messages": messages})).json
        assert told["tokens"] == [BOS, *b"user:Hi"]
        assert (await client.chat("Hi")).json["usage"]["prompt_tokens"] == len(told["tokens"])
        typed = (await client.post("/tokenize", {"messages": [{"role": "user", "content": "<|bos|>Hi"}]})).json
        assert typed["tokens"].count(BOS) == 1
        assert (await client.chat("<|bos|>Hi")).json["usage"]["prompt_tokens"] == len(typed["tokens"])


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"


@pytest.mark.clock
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_bb51_a_callers_template_is_refused_at_once(make_client, path):
    """Under its own name and inside the template's variables, while another stream goes on; harmless variables work."""
    async with make_client(forever, step_s=0.001) as client:
        stream = client.start("/v1/completions", {"prompt": "hi", "stream": True, "max_tokens": 50})
        await stream.first_byte.wait()
        messages = [{"role": "user", "content": "hi"}]
        for fields in ({"chat_template_kwargs": {"chat_template": LOOPS}}, {"chat_template": LOOPS}):
            began = time.perf_counter()
            reply = await client.post(path, {"messages": messages, **fields})
            assert time.perf_counter() - began < 0.1
            assert reply.status == 400
            assert "chat_template" in reply.error["param"]
        for kwargs in ({"enable_thinking": False}, {"x": LOOPS}, {"shout": True}):
            harmless = {"messages": messages, "chat_template_kwargs": kwargs}
            if path != "/tokenize":
                harmless["max_tokens"] = 1
            assert (await client.post(path, harmless)).status == 200
        await stream.task
        assert stream.reply.events[-1] == "[DONE]"


@pytest.mark.clock
async def test_bb30_what_cannot_fit_costs_next_to_nothing(make_client):
    """5 MB, refused by its size alone; how fast, benchmarks/http_costs.py says, on a machine with nothing else to do.
    That others go on meanwhile: test_bad_requests."""
    async with make_client(config=ServerConfig()) as client:
        for body in (b'{"prompt":"' + b"x" * 5_000_000 + b'"}', b'{"prompt":[' + b"1," * 2_500_000 + b"1]}"):
            took = []
            for _ in range(3):
                began = time.perf_counter()
                reply = await client.post("/v1/completions", body)
                took.append(time.perf_counter() - began)
                assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
            assert min(took) < 0.3
