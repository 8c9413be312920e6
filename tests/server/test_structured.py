"""What a request wants its text to look like reaches the engine as a grammar, or is refused by the field's name."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from firsttoken.core.grammar import Grammar
from firsttoken.engine.stub import Fault
from firsttoken.server import structured
from firsttoken.server.structured import CheckedGrammars
from tests.server.conftest import END

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OF_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA, separators=(",", ":")))


def json_schema(**fields):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, **fields}}}


ASKED = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
    (json_schema(), OF_SCHEMA),
    (json_schema(strict=False, description="an x"), OF_SCHEMA),
    ({"guided_json": SCHEMA}, OF_SCHEMA),
    ({"guided_json": OF_SCHEMA.source}, OF_SCHEMA),
    ({"guided_regex": "[0-9]+"}, Grammar("regex", "[0-9]+")),
    ({"guided_choice": ["yes", "no"]}, Grammar("choice", '["yes","no"]')),
    ({"guided_grammar": 'start: "a"+'}, Grammar("lark", 'start: "a"+')),
    ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, Grammar("json_object")),
    ({"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "text"}}, Grammar("choice", '["a"]')),
]


async def test_every_way_to_ask_is_understood_on_both_routes(make_client):
    seen = []

    def script(request):
        seen.append(request.params.grammar)
        return [*b"{}", END]

    async with make_client(script) as client:
        for fields, grammar in ASKED:
            for reply in (await client.chat(**fields), await client.complete(**fields, ignore_eos=True)):
                assert reply.status == 200, reply.json
                assert reply.json["choices"][0]["finish_reason"] == "stop" or grammar is None
                assert seen.pop() == grammar


REFUSED = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema, got 'xml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs its schema"),
    ({"response_format": {"type": "json_object", "json_schema": {"name": "x"}}}, "response_format.json_schema", "type"),
    (json_schema(name="a b"), "response_format.json_schema.name", "'a b'"),
    (json_schema(schema={"not": {}}), "response_format", '"not"'),
    (json_schema(schema={"type": "array", "uniqueItems": True}), "response_format", "uniqueItems"),
    ({"guided_regex": "["}, "guided_regex", "unclosed"),
    ({"guided_regex": ""}, "guided_regex", "needs a source"),
    ({"guided_choice": []}, "guided_choice", "at least one"),
    ({"guided_grammar": 'root ::= "a"'}, "guided_grammar", "GBNF"),
    ({"guided_json": "x" * (300 << 10)}, "guided_json", "too many"),
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "cannot be combined"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "cannot be combined"),
    ({"structured_outputs": {}}, "structured_outputs", "takes one of"),
    ({"structured_outputs": {"regex": "a", "json": SCHEMA}}, "structured_outputs", "takes one of"),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
        "not supported",
    ),
    ({"guided_regex": "a", "bad_words": ["a"]}, "bad_words", "cannot be combined"),
]


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED, ids=[param for _, param, _ in REFUSED])
async def test_a_refusal_names_the_field_before_anything_is_queued(make_client, fields, param, said):
    async with make_client(lambda request: pytest.fail("it was sent to the engine")) as client:
        for reply in (await client.chat(**fields), await client.complete(**fields)):
            assert reply.status == 400
            assert reply.error["param"] == param
            assert said in reply.error["message"]


async def test_an_answer_that_cannot_go_on_is_an_error_of_that_request(make_client):
    async with make_client(lambda request: [ord("{"), Fault("the grammar allows no token here")]) as client:
        reply = await client.chat(response_format={"type": "json_object"})
        assert reply.status == 500
        assert "no token" in reply.error["message"]
        stream = await client.chat(response_format={"type": "json_object"}, stream=True)
        assert "no token" in stream.events[-1]["error"]["message"]


async def test_no_other_work_in_threads_waits_while_many_grammars_are_looked_at(monkeypatch):
    """Forty slow ones held back whatever else went to a thread, for nine seconds."""
    going_on = threading.Event()
    monkeypatch.setattr(structured, "_compile", lambda grammar: going_on.wait(5))
    checked = CheckedGrammars()
    checks = [asyncio.create_task(checked.check(Grammar("regex", f"a{n}"), "guided_regex")) for n in range(40)]
    await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.to_thread(lambda: None), 2)
    going_on.set()
    await asyncio.gather(*checks)
