"""What a request wants its answers' text to look like: OpenAI's ``response_format``, vLLM's ``guided_*`` and
``structured_outputs``, made into a `Grammar`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.grammar import Grammar
from firsttoken.core.structured_outputs import StructuredOutputsParams, schema_grammar
from firsttoken.core.structured_outputs import grammar_of as of_kind
from firsttoken.server.errors import ApiError, bad_request
from firsttoken.server.schema import GenerationRequest, JSONSchemaFormat, ResponseFormat
from firsttoken.server.tools import Tool

FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def grammar_of(request: GenerationRequest) -> Grammar | None:
    """None where any text will do. Raises `ApiError` that names the field."""
    field = grammar_field(request)
    if field is None:
        return None
    value = getattr(request, field)
    try:
        if isinstance(value, ResponseFormat):
            return _of_response_format(value)
        if isinstance(value, StructuredOutputsParams):
            return value.as_grammar()
        return of_kind(field.removeprefix("guided_"), value)
    except InvalidRequest as error:
        param = error.param if error.param and error.param.startswith(field) else field
        raise bad_request(error.message.replace("grammar: ", f"{field}: ", 1), param) from None


def grammar_field(request: GenerationRequest) -> str | None:
    """The field that says what an answer must look like. Raises `ApiError` where several do."""
    given = [name for name in FIELDS if getattr(request, name) is not None]
    if "response_format" in given and request.response_format.type == "text":  # type: ignore[union-attr]
        given.remove("response_format")
    if len(given) > 1:
        raise bad_request(f"{given[0]} and {given[1]} cannot be combined: send one of them", given[1])
    return given[0] if given else None


class CheckedGrammars:
    """Grammars that were found to be usable, so that the next request with one need not wait for that. They are looked
    at on a thread of their own, one after the other: some take a third of a second, and other work waits for none."""

    _MOST = 64

    def __init__(self) -> None:
        self._known: dict[Grammar, None] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar-check")

    async def check(self, grammar: Grammar | None, field: str) -> None:
        """Before a request is queued. Compiles on a thread; raises `ApiError` that says what is wrong with
        ``field``."""
        if grammar is not None:
            await self._check(grammar, field, lambda: _compile(grammar))

    async def check_calls(self, grammar: Grammar, tools: Sequence[Tool]) -> None:
        """The same of a grammar that was made of these tools; what is wrong is said of the tool whose schema it is."""
        await self._check(grammar, "tools", lambda: _compile_calls(grammar, tools))

    async def _check(self, grammar: Grammar, field: str, work: Callable[[], None]) -> None:
        if grammar in self._known:
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except InvalidRequest as error:
            raise ApiError(400, error.message, param=error.param or field, code=error.code) from None
        while len(self._known) >= self._MOST:
            del self._known[next(iter(self._known))]
        self._known[grammar] = None


def _compile(grammar: Grammar) -> None:
    from firsttoken.grammar.schema_faults import schema_fault
    from firsttoken.grammar.source import check

    try:
        check(grammar)
    except InvalidRequest as error:
        schema = msgspec.json.decode(grammar.source) if grammar.kind == "json_schema" else None
        fault = schema_fault(schema) if isinstance(schema, dict) else None
        where = f" (at {fault[0]})" if fault is not None and fault[0] else ""
        raise InvalidRequest(error.message + where, code=error.code) from None


def _compile_calls(grammar: Grammar, tools: Sequence[Tool]) -> None:
    """Raises `InvalidRequest` in the caller's words: those of the grammar's own language are nothing to him."""
    from firsttoken.grammar.schema_faults import schema_fault
    from firsttoken.grammar.source import check

    try:
        check(grammar)
    except InvalidRequest as error:
        for tool in tools:
            fault = schema_fault(tool.schema)
            if fault is not None:
                at = f"{tool.place}.parameters{fault[0]}"
                raise InvalidRequest(
                    f"{at}: calls of the tool {tool.name!r} cannot be held to its schema: {fault[1]}; change the "
                    "schema, or neither force the call nor ask for strict",
                    param=at,
                    code=error.code,
                ) from None
        raise InvalidRequest(
            "calls cannot be held to the schemas of all these tools, each of which is right by itself: offer fewer, or "
            "neither force the call nor ask for strict",
            code=error.code,
        ) from None


def _of_response_format(wanted: ResponseFormat) -> Grammar:
    if wanted.type == "json_object":
        if wanted.json_schema is not None:
            raise bad_request("json_schema needs the type 'json_schema'", "response_format.json_schema")
        return Grammar("json_object")
    if wanted.type != "json_schema":
        raise bad_request(
            f"response_format.type must be text, json_object or json_schema, got {wanted.type!r:.80}",
            "response_format.type",
        )
    given: JSONSchemaFormat | None = wanted.json_schema
    if given is None or given.schema is None:
        raise bad_request(
            'response_format needs its schema: {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
            "response_format.json_schema",
        )
    if not _NAME.fullmatch(given.name):
        raise bad_request(
            f"response_format.json_schema.name must be 1 to 64 letters, digits, _ and -, got {given.name!r:.100}",
            "response_format.json_schema.name",
        )
    return schema_grammar(given.schema)
