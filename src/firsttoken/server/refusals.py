"""Honour or refuse: fields that clients know and we do not implement, with the values that change nothing."""

from __future__ import annotations

import msgspec

from firsttoken.server.errors import bad_request

# field -> values accepted besides null: the field's default, under which leaving it out gives the same answer.
HARMLESS: dict[str, tuple[object, ...]] = {
    "access_programs": (),
    "add_special_tokens": (False,),
    "allowed_callers": (["direct"],),
    "audio": (),
    "background": (False,),
    "background_options": (),
    "caller": ({"type": "direct"},),
    "chat_template": (),
    "citations": (),
    "container": (),
    "context": ("auto",),
    "context_management": ([],),
    "conversation": (),
    "defer_loading": (False,),
    "diagnostics": (),
    "documents": ([],),
    "echo": (False,),
    "embed_dtype": ("float32",),
    "encrypted_content": (),
    "endianness": ("native", "little"),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "generate_summary": (),
    "image": (),
    "include_obfuscation": (False,),
    "inference_geo": (),
    "input_examples": ([],),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "max_tool_calls": (),
    "mcp_servers": ([],),
    "messages": (),
    "mm_processor_kwargs": ({},),
    "mode": ("standard",),
    "modalities": (["text"],),
    "moderation": (),
    "namespace": (),
    "output_format": (),
    "output_schema": (),
    "phase": (),
    "prediction": (),
    "prompt": (),
    "prompt_cache_breakpoint": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "prompt_embeds": (),
    "spaces_between_special_tokens": (True,),
    "speed": ("standard",),
    "store": (False,),
    "suffix": ("",),
    "summary": (),
    "tools": ([],),
    "toolset_name": (),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
    "user_profile_id": (),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
    "workspace_id": (),
}
_ADVICE = {
    "chat_template": "a caller cannot replace the model's chat template; leave it out",
    "function_call": "it has been replaced by tool_choice, as functions by tools; send those",
    "functions": 'it has been replaced by tools; send each as {"type": "function", "function": {...}} in tools',
    "output_format": "here it is called output_config.format",
    "messages": "send each text as input",
    "prompt": "prompts are not kept here; send instructions and input",
    "summary": "reasoning is shown as it is; leave it out",
}


def refused_fields(struct: type[msgspec.Struct]) -> tuple[str, ...]:
    """The fields of a request that are known but not implemented *there* (``echo`` is, in completions)."""
    anything = msgspec.inspect.AnyType()
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    return tuple(field.name for field in info.fields if field.type == anything)


def refuse_unimplemented(request: msgspec.Struct, fields: tuple[str, ...], prefix: str = "") -> None:
    """Raises a 400 naming the first field that asks for something we would ignore."""
    values = [getattr(request, name) for name in fields]
    if values.count(None) == len(values):
        return
    for name, value in zip(fields, values, strict=True):
        if value is None or any(_same(value, harmless) for harmless in HARMLESS[name]):
            continue
        advice = _ADVICE.get(name) or _advice(name)
        raise bad_request(f"{prefix}{name} is not supported: {advice}", f"{prefix}{name}", "unsupported_parameter")


def _same(value: object, harmless: object) -> bool:
    # True == 1 in Python, but not in JSON.
    return isinstance(value, bool) == isinstance(harmless, bool) and value == harmless


def _advice(name: str) -> str:
    values = HARMLESS[name]
    if not values:
        return "leave it out"
    return "leave it out or send " + " or ".join(msgspec.json.encode(value).decode() for value in values)
