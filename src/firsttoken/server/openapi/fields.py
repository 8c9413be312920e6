"""What the fields of requests mean and which values they take, field by field, and their types where the server keeps
them raw until their size has been checked.

The types and the set of fields come from `server.schema`; a field that is not described here fails the build of the
document, so that none is forgotten. A name means the same in all requests, but where "Struct.name" says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from firsttoken.core.cache_hint import MAX_TTL_S, TOOL_RESULT
from firsttoken.core.sampling_params import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_SEED,
    MAX_STOPS,
)
from firsttoken.core.service import CLASS_NAMES, MAX_DEADLINE_MS
from firsttoken.server.call import MAX_ID_CHARS
from firsttoken.server.decode import MAX_TOKEN_ID
from firsttoken.server.messages.schema import InputMessage
from firsttoken.server.openapi.responses import INPUT
from firsttoken.server.responses.request import MAX_KEY_CHARS, MAX_METADATA, MAX_VALUE_CHARS
from firsttoken.server.responses.schema import Item
from firsttoken.server.service import MAX_PRIORITY, MAX_SALT_CHARS
from firsttoken.server.template_inputs import EFFORTS
from firsttoken.server.tools import MAX_TOOLS
from firsttoken.text.tools.formats import MAX_NAME

_MAX_INT = 2**31 - 1

# ------------------------------------------------------------------- raw fields' types

TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]


class TextPart(msgspec.Struct):
    """Parts are joined without anything between them."""

    type: Literal["text"]
    text: str


class ToolFunction(msgspec.Struct):
    """``arguments`` is a JSON object, as text or as it is."""

    name: str
    arguments: str | dict[str, Any] = ""


class PastToolCall(msgspec.Struct):
    """A call that the assistant made earlier in the conversation."""

    function: ToolFunction
    id: str | None = None
    type: Literal["function"] = "function"


class _Message(msgspec.Struct, kw_only=True, tag_field="role"):
    name: str | None = None


class SystemMessage(_Message, tag="system"):
    """What the model is told before all else."""

    content: str | list[TextPart]


class DeveloperMessage(_Message, tag="developer"):
    """A system message, unless the model's template knows the role."""

    content: str | list[TextPart]


class UserMessage(_Message, tag="user"):
    """What the user says."""

    content: str | list[TextPart]


class AssistantMessage(_Message, tag="assistant"):
    """An earlier answer; one that called tools may have no content."""

    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[PastToolCall] | None = None


class ToolMessage(_Message, tag="tool"):
    """What a tool gave back."""

    content: str | list[TextPart]
    tool_call_id: str | None = None


Messages = Annotated[
    list[SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage], msgspec.Meta(min_length=1)
]

RAW: dict[str, Any] = {
    "ChatRequest.messages": Messages,
    "CompletionRequest.prompt": Any,  # says itself what it takes: msgspec has no union of lists
    "TokenizeRequest.prompt": str | None,
    "TokenizeRequest.messages": Messages | None,
    "DetokenizeRequest.tokens": list[TokenId],
    "ResponsesRequest.input": str | list[Item],
    "MessagesRequest.messages": list[InputMessage],
    "CountTokensRequest.messages": list[InputMessage],
    "EmbeddingRequest.input": Any,  # the same
    "ScoreRequest.text_1": str | list[str],
    "ScoreRequest.text_2": str | list[str],
    "RerankRequest.query": str | list[str],
    "RerankRequest.documents": str | list[str],
}
# Numbers that need not be whole, though the server's type for them is that of whole ones.
FRACTIONS = frozenset({"deadline_ms", "ttl_s"})

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}, "minItems": 1}
_PROMPT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        _IDS,
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}


@dataclass(frozen=True, slots=True)
class Field:
    """What one says of a field; ``bounds`` are JSON Schema's words for which of its type's values it takes."""

    text: str
    bounds: dict[str, Any]


def _field(text: str, **bounds: Any) -> Field:
    return Field(text, bounds)


def _range(text: str, low: float, high: float) -> Field:
    return _field(text, minimum=low, maximum=high)


FIELDS = {
    "model": _field("The served model's name, or left out."),
    "messages": _field("The conversation, oldest message first."),
    "prompt": _field("The text."),
    "CompletionRequest.prompt": _field("Text or token ids, or a list of either for several prompts.", **_PROMPT),
    "tokens": _field("Token ids of the model."),
    "stream": _field("Answer with server-sent events, a piece each."),
    "stream_options": _field("Only with `stream`."),
    "n": _range("How many answers.", 1, MAX_N),
    "max_tokens": _range("The longest answer, in tokens: a bound, which may lie beyond the context.", 1, _MAX_INT),
    "max_output_tokens": _range(
        "The longest answer, in tokens: a bound, which may lie beyond the context.", 1, _MAX_INT
    ),
    "max_completion_tokens": _range("The same as `max_tokens`.", 1, _MAX_INT),
    "min_tokens": _range("No end token before so many.", 0, _MAX_INT),
    "temperature": _field("0 takes the likeliest token always.", minimum=0),
    "top_p": _field("Sample from the likeliest tokens of this probability.", exclusiveMinimum=0, maximum=1),
    "top_k": _range("Sample from so many of the likeliest tokens; 0 or -1 for all.", -1, _MAX_INT),
    "min_p": _range("Sample from tokens of at least this part of the likeliest one's probability.", 0, 1),
    "presence_penalty": _range("Taken from the logits of tokens that the answer has.", -2, 2),
    "frequency_penalty": _range("Taken from them once for each time.", -2, 2),
    "repetition_penalty": _field(
        "Divides the logits of tokens that prompt or answer have.", exclusiveMinimum=0, maximum=1e6
    ),
    "seed": _range("Fixes the random numbers, whatever else the server does.", -MAX_SEED, MAX_SEED - 1),
    "stop": _field("Ends the answer before this text, or any of several.", minLength=1, maxItems=MAX_STOPS),
    "stop_token_ids": _field("Ends the answer after any of these tokens."),
    "include_stop_str_in_output": _field("Leave the stop text in the answer."),
    "ignore_eos": _field("The model's own end tokens do not end the answer."),
    "skip_special_tokens": _field("False shows control tokens in the text."),
    "logit_bias": _field(
        "Added to the logits of token ids (-100 to 100).",
        propertyNames={"pattern": "^(0|[1-9][0-9]{0,9})$"},
        additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
    ),
    "ChatRequest.logprobs": _field("Show the logarithm of each token's probability."),
    "top_logprobs": _range("So many of the likeliest tokens at each place. Needs `logprobs`.", 0, MAX_LOGPROBS),
    "CompletionRequest.logprobs": _range("Show so many of the likeliest tokens at each place.", 0, MAX_LOGPROBS),
    "echo": _field("The text begins with the prompt."),
    "add_special_tokens": _field("False leaves out what the tokenizer puts before a text."),
    "add_generation_prompt": _field("False leaves out what begins the assistant's message."),
    "chat_template_kwargs": _field("More variables for the model's chat template."),
    "tools": _field("What the model may call.", maxItems=MAX_TOOLS),
    "ToolFunction.name": _field("What the model calls it by.", pattern=f"^[A-Za-z0-9_.-]{{1,{MAX_NAME}}}$"),
    "ToolFunction.parameters": _field(
        "The JSON schema of its arguments.", properties={"type": {"const": "object"}, "properties": {"type": "object"}}
    ),
    "tool_choice": _field("Whether tools are called: as the model decides (`auto`), never, or for sure."),
    "parallel_tool_calls": _field("False: one call at most."),
    "reasoning_effort": _field("How much to think, where the model's template reads it.", enum=[*EFFORTS, None]),
    "enable_thinking": _field("Whether to think, where the model's template reads it."),
    "continue_final_message": _field("The answer goes on with the last message, the assistant's."),
    "ChatRequest.echo": _field("The answer begins with the last message, the assistant's."),
    "include_reasoning": _field("False leaves out what the model thinks."),
    "return_token_strs": _field("Show each token as text."),
    "priority": _range("Lower goes first, inside a service class.", -MAX_PRIORITY, MAX_PRIORITY - 1),
    "service_tier": _field(
        "The service class.",
        enum=["auto", "default", "fast", "flex", "priority", "p0", "p1", "p2", None],
    ),
    "cache_salt": _field(
        "Only requests with the same one share cached prompts.", minLength=1, maxLength=MAX_SALT_CHARS
    ),
    "allowed_token_ids": _field("Only these tokens can be chosen.", minItems=1),
    "bad_words": _field(
        "Texts that the answer must not hold.",
        maxItems=MAX_BAD_WORDS,
        items={"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_CHARS, "pattern": "\\S"},
    ),
    "response_format": _field(
        "What the text must look like: `text`, any JSON object, or JSON by a schema. It ends within `max_tokens`."
    ),
    "structured_outputs": _field("What the text must look like, as vLLM has it: one of its fields."),
    "guided_json": _field("A JSON schema that the text must follow."),
    "guided_regex": _field("A regular expression that the whole text must match.", minLength=1),
    "guided_choice": _field(
        "The texts of which the answer is one.", minItems=1, items={"type": "string", "minLength": 1}
    ),
    "guided_grammar": _field("A grammar in llguidance's dialect of Lark that the text must follow.", minLength=1),
    "return_tokens_as_token_ids": _field("Log-probabilities name tokens `token_id:N`."),
    "prompt_logprobs": _range(
        "Show the log-probability of each token of the prompt, and of so many of the likeliest in its place.",
        0,
        MAX_LOGPROBS,
    ),
    "best_of": _field("The same as `n`, or left out."),
    "return_token_ids": _field("Show the token ids of prompt and answer."),
    "timings": _field("Show the account of the request's time."),
    "deadline_ms": _field(
        "Of no use unless it starts within so many ms of its arrival: else 504.",
        exclusiveMinimum=0,
        maximum=MAX_DEADLINE_MS,
    ),
    "cache_hint": _field("How long the KV of prompt and answer should stay."),
    "CacheHint.ttl_s": _field("Seconds, after the last use.", exclusiveMinimum=0, maximum=MAX_TTL_S),
    "CacheHint.until": _field("Only until the conversation goes on.", enum=[TOOL_RESULT, None]),
    "CacheHint.priority": _field("The class by which eviction scores it.", enum=[*CLASS_NAMES, None]),
    "StreamOptions.include_usage": _field("A last chunk with the tokens used."),
    "StreamOptions.continuous_usage_stats": _field("The tokens used so far on every chunk. Needs `include_usage`."),
    "ResponsesRequest.input": _field("What the user says, or the items of a conversation.", **INPUT),
    "instructions": _field("The system message before it all, of this response alone."),
    "previous_response_id": _field("The kept response that this one goes on from."),
    "store": _field("False: do not keep the response."),
    "include": _field("`message.output_text.logprobs` shows the probabilities of the text's tokens."),
    "ResponsesRequest.top_logprobs": _range("So many of the likeliest tokens at each place.", 0, MAX_LOGPROBS),
    "ResponsesRequest.metadata": _field(
        "Told again in the response.",
        maxProperties=MAX_METADATA,
        propertyNames={"maxLength": MAX_KEY_CHARS},
        additionalProperties={"type": "string", "maxLength": MAX_VALUE_CHARS},
    ),
    "text": _field("What the text of the answer must be like."),
    "reasoning": _field("How much a model that can think thinks."),
    "system": _field("What the model is told before all else."),
    "stop_sequences": _field("Ends the answer before any of these texts.", maxItems=MAX_STOPS),
    "MessagesRequest.temperature": _range("0 takes the likeliest token always.", 0, 1),
    "MessagesRequest.service_tier": _field(
        "The service class; `standard_only` is `p2`.",
        enum=["auto", "default", "fast", "flex", "priority", "p0", "p1", "p2", "standard_only", None],
    ),
    "thinking": _field("Whether a model that can think does."),
    "output_config": _field("What the answer must be like, and how much is thought before it."),
    "cache_control": _field("How long the KV of prompt and answer should stay: as `cache_hint`."),
    "EmbeddingRequest.input": _field("Text or token ids, or a list of either.", **_PROMPT),
    "encoding_format": _field("Numbers, or base64 of float32.", enum=["float", "base64", None]),
    "dimensions": _field("Only so many numbers of each vector, from its beginning.", minimum=1),
    "normalize": _field("Vectors of length 1, or as they are; left out, as the model has them."),
    "truncate_prompt_tokens": _field(
        "Only so many tokens of a prompt, the last; -1: as many as the model takes.", minimum=-1
    ),
    "request_id": _field(
        "The request's id, as the header `X-Request-Id`.", pattern=f"^[A-Za-z0-9._:/+=@-]{{1,{MAX_ID_CHARS}}}$"
    ),
    "text_1": _field("One text for all of the others, or as many."),
    "text_2": _field("What they are compared with."),
    "query": _field("The text that documents are compared with."),
    "RerankRequest.documents": _field("What is ranked."),
    "top_n": _field("The best so many; 0 or left out: all.", minimum=0),
    "return_documents": _field("False: places and scores alone."),
    "user": _field("Changes nothing."),
    "metadata": _field("Changes nothing."),
    "prompt_cache_key": _field("Changes nothing."),
    "safety_identifier": _field("Changes nothing."),
}


def describe(struct: str, name: str, *, optional: bool = False) -> Field | None:
    """Raises `LookupError` for a field that nobody has described; None for one that need not be (``optional``)."""
    found = FIELDS.get(f"{struct}.{name}")
    if optional or found is not None:
        return found
    if name not in FIELDS:
        raise LookupError(f"{struct}.{name} is not described: add it to FIELDS in server/openapi/fields.py")
    return FIELDS[name]


def raw_type(struct: str, name: str) -> Any:
    """The type of a field that is kept raw. Raises `LookupError`."""
    try:
        return RAW[f"{struct}.{name}"]
    except KeyError:
        raise LookupError(f"{struct}.{name} is kept raw: say its type in RAW in server/openapi/fields.py") from None
