"""A model's chat template: from messages to the prompt's text."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, meta, nodes

from firsttoken.core.errors import CheckpointError, InvalidRequest
from firsttoken.text.caller_texts import caller_texts, with_twins
from firsttoken.text.control_tokens import ControlTokens, Rendered, Twins
from firsttoken.text.messages import normalize_messages
from firsttoken.text.template_sandbox import Budget, TemplateEnvironment, TemplateLimit, TemplateRaised

MAX_SOURCE = 256 << 10
"""Characters of a template; the longest in use are a tenth of it."""

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "chat_template"})
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
# What a render may cost, fixed and by what it is given; an ordinary template uses about a tenth of it.
_ROUNDS, _ROUNDS_PER_MESSAGE, _CHARACTERS_PER_ROUND = 20_000, 200, 8
_TIME_NS, _TIME_NS_PER_MESSAGE, _TIME_NS_PER_CHARACTER = 80_000_000, 100_000, 10


class ChatTemplate:
    """Compiled once, rendered from any thread. It is the checkpoint's own, or the operator's; never a caller's.

    Raises `CheckpointError` when ``source`` is not a template that can be run (syntax, an unknown filter, too long).
    ``reads`` holds the names of the variables that the template looks at, ``writes`` all texts that are its own.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        unk_token: str | None = None,
    ) -> None:
        if len(source) > MAX_SOURCE:
            raise CheckpointError(
                f"the template has {len(source)} characters; the limit is {MAX_SOURCE}", field="chat_template"
            )
        self._environment = TemplateEnvironment()
        try:
            tree = self._environment.parse(source)
            self.reads = frozenset(meta.find_undeclared_variables(tree))
            self._template = self._environment.from_string(source)
        except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise CheckpointError(f"the template cannot be used: {error}", field="chat_template") from error
        self.source = source
        self._constants = {
            name: token or ""
            for name, token in zip(_SPECIAL, (bos_token, eos_token, pad_token, unk_token), strict=True)
        }
        self.writes = frozenset(text for text in (*_texts(tree), *self._constants.values()) if text)
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text for ``messages`` (see `normalize_messages` for what is accepted). Which of its control
        tokens are the template's it does not tell: what a caller sends is for `render_apart`.

        ``template_kwargs`` are the caller's ``chat_template_kwargs``: variables for the template
        (``enable_thinking``), never the template itself or what it is given here. Raises `InvalidRequest` when the
        messages are not well-formed, when the template refuses them, or when it wants more work than a conversation
        of this size needs.
        """
        return self.render_apart(
            messages,
            None,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            template_kwargs=template_kwargs,
        ).text

    def render_apart(
        self,
        messages: Sequence[Mapping[str, Any]],
        controls: ControlTokens | None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """As `render`, and where the text has ``controls`` that are not the template's. With ``continue_final_message``
        it ends where the content of the last message does, which must be the assistant's."""
        kwargs = dict(template_kwargs or {})
        self._check_kwargs(kwargs)
        if tools and "tools" not in self.reads:
            raise InvalidRequest("tools: this model's chat template does not support tools", param="tools")
        plain = normalize_messages(messages, developer=self._knows_developer)
        given = list(tools) if tools else None
        end = _mark_end(plain) if continue_final_message else None
        texts = caller_texts(plain, given, kwargs)
        budget = _budget(plain, tools)
        twins = None if controls is None else controls.twins(texts)
        if twins is not None:
            plain, given, kwargs = with_twins(plain, given, kwargs, twins)
        values = {
            **self._constants,
            **kwargs,
            "messages": plain,
            "tools": given,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = self._run(values, budget, twins)
        if end is not None:
            text = _up_to(text, end if twins is None else twins.seen(end))
        return Rendered(text) if twins is None or controls is None else Rendered.of(text, twins, controls)

    def _run(self, values: dict[str, Any], budget: Budget, twins: Twins | None) -> str:
        self._environment.begin(budget, twins)
        try:
            return self._template.render(values)
        except TemplateRaised as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from error
        except TemplateLimit as error:
            raise InvalidRequest(f"the messages cannot be rendered: {error}", param="messages") from error
        except Exception as error:  # templates run arbitrary expressions on what the caller sent
            raise InvalidRequest(
                f"the chat template failed on these messages: {type(error).__name__}: {str(error)[:500]}",
                param="messages",
            ) from error
        finally:
            self._environment.end()

    def _check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        for name in kwargs:
            if name in _RESERVED or name in self._constants or name in self._environment.globals:
                raise InvalidRequest(
                    f"chat_template_kwargs.{name} cannot be set by a request",
                    param=f"chat_template_kwargs.{name}",
                )


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Put a mark behind the content of the last message, and return it: none can guess it, and no template trims it."""
    last = messages[-1]
    if last["role"] != "assistant":
        raise InvalidRequest(
            f"continue_final_message: the last message is the {last['role']}'s, and only one of the assistant's can be "
            "gone on with: send such a message last, or leave it out",
            param="continue_final_message",
        )
    if last.get("tool_calls"):
        raise InvalidRequest(
            "continue_final_message: the last message has tool_calls, behind which there is nothing to go on with",
            param="continue_final_message",
        )
    mark = f"\U0010fffd{secrets.token_hex(8)}\U0010fffd"
    last["content"] += mark
    return mark


def _up_to(text: str, mark: str) -> str:
    before, found, after = text.partition(mark)
    if not found or mark in after:
        raise InvalidRequest(
            "continue_final_message: this model's chat template does not write the last message's content as it is",
            param="continue_final_message",
        )
    return before


def _texts(tree: nodes.Template) -> list[str]:
    found = [one.data for one in tree.find_all(nodes.TemplateData)]
    return found + [one.value for one in tree.find_all(nodes.Const) if isinstance(one.value, str)]


def _budget(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Budget:
    characters = sum(len(message["content"]) for message in messages)
    items = len(messages) + 10 * len(tools or ())
    return Budget(
        rounds=_ROUNDS + _ROUNDS_PER_MESSAGE * items + characters // _CHARACTERS_PER_ROUND,
        time_ns=_TIME_NS + _TIME_NS_PER_MESSAGE * items + _TIME_NS_PER_CHARACTER * characters,
    )
