"""The ways in which models write tool calls, each as little as its own marks ask for."""

from __future__ import annotations

import json
import random
import re
import string

from firsttoken.text.tools.cursor import Steps
from firsttoken.text.tools.reader import ToolFormat, ToolReader, Written

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
MAX_NAME = 64
# Ids are no secret; a generator of its own, so that a caller of random.seed() cannot make them repeat.
_IDS = random.Random()
_ARGUMENTS = ("arguments", "parameters")
# What else stands in the objects that models write for calls, and says nothing to the caller.
_BESIDE = ("id", "type")


def call_id() -> str:
    """An id as OpenAI's look."""
    return f"call_{_IDS.getrandbits(96):024x}"


def read_object(reader: ToolReader) -> Steps[bool]:
    """A call as one JSON object at the cursor, ``{"name": .., "arguments": {..}}``; False where none was begun.

    The name comes first in what models write, and the arguments are then told as they come. In another order they are
    held back until the name is there.
    """
    cursor = reader.cursor
    if not (yield from cursor.take("{")):
        return False
    name: str | None = None
    held: str | None = None
    first = True
    while first or (yield from cursor.skip_space()) != "}":
        if not first and not (yield from cursor.take(",")):
            return False
        first = False
        yield from cursor.skip_space()
        key = yield from cursor.string()
        yield from cursor.skip_space()
        if key is None or not (yield from cursor.take(":")):
            return False
        after = yield from cursor.skip_space()
        if key == "name" and name is None:
            name = yield from cursor.string()
            if name not in reader.offer.schemas:
                return False
        elif key in _ARGUMENTS and held is None:
            if name is not None and after == "{":
                return (yield from read_arguments(reader, name, wrapped=True))
            held = yield from cursor.value()
            if held is None:
                return False
        elif key not in _BESIDE or (yield from cursor.value()) is None:
            return False
    cursor.at += 1
    arguments = _as_object(held)
    if name is None or arguments is None:
        return False
    reader.start(name)
    reader.argue(arguments)
    return True


def read_arguments(reader: ToolReader, name: str, *, wrapped: bool = False) -> Steps[bool]:
    """Begin a call of ``name`` with the object at the cursor as its arguments, told as they come; False where none is
    begun. If they break off, what stands there is left to be content. ``wrapped``: another object ends behind it."""
    cursor = reader.cursor
    start = cursor.at
    if not (yield from cursor.take("{")) or (yield from cursor.skip_space()) not in ('"', "}"):
        return False
    cursor.at = start
    reader.start(name)
    if (yield from cursor.brackets(reader.argue)) and wrapped:
        yield from _end(reader)
    return True


def _end(reader: ToolReader) -> Steps[None]:
    """The end of the object around the arguments. What stands there instead of it is left to be content."""
    cursor = reader.cursor
    end = cursor.at
    while (yield from cursor.skip_space()) == ",":
        yield from cursor.take(",")
        yield from cursor.skip_space()
        key = yield from cursor.string()
        yield from cursor.skip_space()
        if key not in _BESIDE or not (yield from cursor.take(":")):
            break
        yield from cursor.skip_space()
        if (yield from cursor.value()) is None:
            break
    if not (yield from cursor.take("}")):
        cursor.at = end


def _as_object(arguments: str | None) -> str | None:
    """Arguments that were held back, as the text of an object: none at all are {}, and some models write them as a
    string that holds the JSON."""
    if arguments in (None, "null"):
        return "{}"
    try:
        value = json.loads(arguments or "")
        if isinstance(value, str):
            arguments, value = value, json.loads(value)
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(value, dict) else None


class Hermes:
    """``<tool_call>{"name": .., "arguments": {..}}</tool_call>``: Hermes, Qwen 2.5 and 3, and many others."""

    name = "hermes"
    triggers = ("<tool_call>",)
    markers = ("<tool_call>", "</tool_call>")
    bare = False
    written = Written('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n")
    new_id = staticmethod(call_id)

    def read(self, reader: ToolReader) -> Steps[None]:
        cursor = reader.cursor
        yield from cursor.take("<tool_call>")
        yield from cursor.skip_space()
        if (yield from read_object(reader)):
            end = cursor.at
            yield from cursor.skip_space()
            if not (yield from cursor.take("</tool_call>")):
                cursor.at = end


class Llama3:
    """``{"name": .., "parameters": {..}}`` as the whole answer, or after ``<|python_tag|>``; several with ``;``
    between them."""

    name = "llama3"
    triggers = ("<|python_tag|>",)
    markers = ("<|python_tag|>",)
    bare = True
    written = Written('{"name": "', '", "parameters": ', "}", "; ")
    new_id = staticmethod(call_id)

    def read(self, reader: ToolReader) -> Steps[None]:
        cursor = reader.cursor
        yield from cursor.take("<|python_tag|>")
        yield from cursor.skip_space()
        made = yield from read_object(reader)
        while made and reader.may_call:
            end = cursor.at
            if (yield from cursor.skip_space()) == ";":
                yield from cursor.take(";")
                yield from cursor.skip_space()
            made = yield from read_object(reader)
            if not made:
                cursor.at = end


class Mistral:
    """``[TOOL_CALLS][{"name": .., "arguments": {..}}, ..]``; since 2025 ``[TOOL_CALLS]name[ARGS]{..}`` for each
    (``named``). Both are read, whichever the model at hand was taught."""

    name = "mistral"
    triggers = ("[TOOL_CALLS]",)
    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    bare = False

    def __init__(self, *, named: bool = False) -> None:
        self.written = Written('{"name": "', '", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]")
        if named:
            self.written = Written("[TOOL_CALLS]", "[ARGS]")

    def new_id(self) -> str:
        """Mistral's templates refuse any other form."""
        return "".join(_IDS.choices(string.ascii_letters + string.digits, k=9))

    def read(self, reader: ToolReader) -> Steps[None]:
        cursor = reader.cursor
        yield from cursor.take("[TOOL_CALLS]")
        if (yield from cursor.skip_space()) == "[":
            yield from self._list(reader)
        else:
            yield from self._named(reader)

    def _list(self, reader: ToolReader) -> Steps[None]:
        cursor = reader.cursor
        yield from cursor.take("[")
        yield from cursor.skip_space()
        end = cursor.at
        while (yield from read_object(reader)):
            end = cursor.at
            mark = yield from cursor.skip_space()
            if mark == "]":
                cursor.at += 1
                return
            if mark != "," or not reader.may_call:
                break
            cursor.at += 1
            yield from cursor.skip_space()
        cursor.at = end

    def _named(self, reader: ToolReader) -> Steps[None]:
        cursor = reader.cursor
        name = yield from cursor.match(_NAME, MAX_NAME)
        if (yield from cursor.take("[CALL_ID]")):
            yield from cursor.match(_NAME, MAX_NAME)
        yield from cursor.take("[ARGS]")
        if name in reader.offer.schemas:
            yield from cursor.skip_space()
            yield from read_arguments(reader, name)


class Qwen3Coder:
    """``<tool_call><function=name><parameter=key>value</parameter>..</function></tool_call>``: values are bare text,
    and the tool's schema says what they are."""

    name = "qwen3_coder"
    triggers = ("<tool_call>", "<function=")
    markers = ("<tool_call>", "</tool_call>")
    bare = False
    written = Written("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "\n")
    new_id = staticmethod(call_id)

    def read(self, reader: ToolReader) -> Steps[None]:
        cursor = reader.cursor
        yield from cursor.take("<tool_call>")
        yield from cursor.skip_space()
        if not (yield from cursor.take("<function=")):
            return
        name = yield from cursor.match(_NAME, MAX_NAME)
        if name not in reader.offer.schemas or not (yield from cursor.take(">")):
            return
        reader.start(name)
        reader.argue("{")
        cursor.drop()
        yield from self._parameters(reader, name)
        end = cursor.at
        yield from cursor.skip_space()
        if not (yield from cursor.take("</tool_call>")):
            cursor.at = end

    def _parameters(self, reader: ToolReader, name: str) -> Steps[None]:
        cursor = reader.cursor
        properties = reader.offer.schemas[name].get("properties")
        between = ""
        while True:
            end = cursor.at
            yield from cursor.skip_space()
            if (yield from cursor.take("</function>")):
                reader.argue("}")
                return
            key = None
            if (yield from cursor.take("<parameter=")):
                key = yield from cursor.until(">")
            if key is None:
                cursor.at = end
                return
            start = cursor.at
            value = yield from cursor.until("</parameter>")
            reader.argue(f"{between}{json.dumps(key, ensure_ascii=False)}: ")
            if value is None:  # cut off: what came of it, as far as it goes
                cut = cursor.text[start:].removeprefix("\n")
                cursor.at = len(cursor.text)
                reader.argue(json.dumps(cut, ensure_ascii=False)[:-1])
                return
            reader.argue(_typed(_trimmed(value), properties.get(key) if isinstance(properties, dict) else None))
            cursor.drop()
            between = ", "


def _trimmed(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


def _typed(value: str, schema: object) -> str:
    """A bare value as JSON: text where the schema says so, else what it reads as, else text."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    if kinds != "string":
        bare = value.strip()
        literal = {"True": "true", "False": "false", "None": "null"}.get(bare, bare)
        try:
            json.loads(literal, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            pass
        else:
            return literal
    return json.dumps(value, ensure_ascii=False)


def _no_constant(word: str) -> None:
    raise ValueError(word)  # NaN and Infinity are no JSON


class NoCalls:
    """Content alone, without marks that are control tokens."""

    name = "none"
    triggers = ()
    markers = ()
    bare = False
    written = Written("", "")
    new_id = staticmethod(call_id)

    def read(self, reader: ToolReader) -> Steps[None]:
        """Never asked for: nothing begins a call."""
        yield from ()


FORMATS: dict[str, ToolFormat] = {form.name: form for form in (Hermes(), Llama3(), Mistral(), Qwen3Coder())}
