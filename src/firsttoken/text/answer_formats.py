"""How the served model writes what is more than text: its tool calls and its reasoning. Chosen once, at the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from firsttoken.core.errors import ConfigError
from firsttoken.core.parser_names import AUTO, NONE
from firsttoken.text.reasoning import REASONING_FORMATS, ReasoningFormat, Thinks
from firsttoken.text.tools.formats import FORMATS, Mistral
from firsttoken.text.tools.reader import ToolFormat

if TYPE_CHECKING:
    from firsttoken.text.chat_template import ChatTemplate
    from firsttoken.text.tokenizer import Tokenizer

# What a template writes for the calls of past turns, or tells the model to write: the first that it holds.
_SIGNS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": dictionary of argument name', "llama3"),
)


@dataclass(frozen=True, slots=True)
class Marks:
    """Texts that a reader looks for and that are control tokens of the model: ``ids`` must come to it as text, and
    nobody else is shown ``texts``."""

    ids: frozenset[int] = frozenset()
    texts: frozenset[str] = frozenset()

    @classmethod
    def of(cls, texts: tuple[str, ...], tokenizer: Tokenizer | None) -> Marks:
        if tokenizer is None:
            return cls()
        found = {text: index for text in texts if (index := tokenizer.special_id(text)) is not None}
        return cls(frozenset(found.values()), frozenset(found))


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """None where the model has none, or is not asked to: ``why_no_tools`` then says why a caller's are refused."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    why_no_tools: str = "this model has no chat template"
    tool_marks: Marks = Marks()
    reasoning_marks: Marks = Marks()

    @classmethod
    def choose(
        cls, template: ChatTemplate | None, tokenizer: Tokenizer | None, *, tools: str = AUTO, reasoning: str = AUTO
    ) -> AnswerFormats:
        """By name, or by what the model's template says (`AUTO`). Raises `ConfigError` for a parser by name where there
        is no template."""
        if template is None or tokenizer is None:
            for flag, name in (("--tool-parser", tools), ("--reasoning-parser", reasoning)):
                if name not in (AUTO, NONE):
                    raise ConfigError(
                        f"{flag} {name}: this model has no chat template, so it cannot chat; leave it out"
                    )
            return cls()
        form, why = _tool_format(template, tools)
        thinks = _reasoning_format(template) if reasoning == AUTO else REASONING_FORMATS.get(reasoning)
        return cls(
            form,
            thinks,
            why,
            Marks.of(form.markers if form is not None else (), tokenizer),
            Marks.of((thinks.opening, thinks.closing) if thinks is not None else (), tokenizer),
        )

    def thinks(self, prompt: str, begun: str = "") -> Thinks:
        """As `ReasoningFormat.after`."""
        return "no" if self.reasoning is None else self.reasoning.after(prompt, begun)

    def lines(self) -> list[str]:
        """What was chosen, for the lines of the start."""
        return [
            f"tool parser {NONE if self.tools is None else self.tools.name}",
            f"reasoning parser {NONE if self.reasoning is None else self.reasoning.name}",
        ]


def _tool_format(template: ChatTemplate, name: str) -> tuple[ToolFormat | None, str]:
    if name == NONE:
        return None, "this server was started with --tool-parser none"
    if "tools" not in template.reads:
        return None, "this model's chat template does not support tools"
    if name != AUTO:
        return _taught(FORMATS[name], template), ""
    for sign, found in _SIGNS:
        if sign in template.source:
            return _taught(FORMATS[found], template), ""
    known = ", ".join(FORMATS)
    return None, (
        "its template does not say how this model writes tool calls: if it is one of the ways that are known here "
        f"({known}), start the server with --tool-parser"
    )


def _taught(form: ToolFormat, template: ChatTemplate) -> ToolFormat:
    """Of Mistral's two ways of writing the one that the template writes."""
    return Mistral(named=True) if form.name == "mistral" and "[ARGS]" in template.source else form


def _reasoning_format(template: ChatTemplate) -> ReasoningFormat | None:
    if "<think>" in template.source:
        return REASONING_FORMATS["qwen3"]
    # It cuts off what past turns thought, and leaves it to the model to open what it thinks now.
    return REASONING_FORMATS["deepseek_r1"] if "</think>" in template.source else None
