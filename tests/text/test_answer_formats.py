"""What is chosen for a model by its template, as templates of these families have it."""

from __future__ import annotations

import pytest

from firsttoken.core.errors import ConfigError
from firsttoken.text.answer_formats import AnswerFormats
from firsttoken.text.chat_template import ChatTemplate
from tests.support.byte_tokenizer import VOCAB_SIZE, byte_tokenizer

TOOLS = "{% for t in tools %}{{ t | tojson }}{% endfor %}"
PAST = "{% for m in messages %}{% for c in m.tool_calls %}"
END = "{% endfor %}{% endfor %}"
QWEN3 = (
    f"{TOOLS}{PAST}<tool_call>{{{{ c | tojson }}}}</tool_call>{END}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
FAMILIES = {
    "qwen 2.5": (f"{TOOLS}{PAST}<tool_call>{{{{ c | tojson }}}}</tool_call>{END}", "hermes", "none"),
    "qwen 3": (QWEN3, "hermes", "qwen3"),
    "qwen 3 coder": (f"{TOOLS}{PAST}<tool_call><function={{{{ c.function.name }}}}>{END}", "qwen3_coder", "none"),
    "llama 3.1": (f"{TOOLS}{PAST}<|python_tag|>{{{{ c.function.name }}}}{END}", "llama3", "none"),
    "mistral": (f"{TOOLS}{PAST}[TOOL_CALLS][{{{{ c | tojson }}}}]{END}", "mistral", "none"),
    "mistral 2025": (f"{TOOLS}{PAST}[TOOL_CALLS]{{{{ c.function.name }}}}[ARGS]{END}", "mistral", "none"),
    "r1": ("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}", "none", "deepseek_r1"),
    "smollm2": ("{% for m in messages %}{{ m.content }}{% endfor %}", "none", "none"),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("marked"), ("[TOOL_CALLS]", "<think>"))


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_reads_the_template(family, tokenizer):
    source, tools, reasoning = FAMILIES[family]
    formats = AnswerFormats.choose(ChatTemplate(source), tokenizer)
    assert formats.lines() == [f"tool parser {tools}", f"reasoning parser {reasoning}"]
    assert bool(formats.why_no_tools) is (formats.tools is None)


def test_mistrals_calls_are_written_as_its_template_does(tokenizer):
    old, new = (
        AnswerFormats.choose(ChatTemplate(FAMILIES[name][0]), tokenizer) for name in ("mistral", "mistral 2025")
    )
    assert old.tools.written.opening == "[TOOL_CALLS]["
    assert new.tools.written.between == "[ARGS]"
    assert old.tool_marks.ids == {VOCAB_SIZE}
    assert old.tool_marks.texts == {"[TOOL_CALLS]"}


def test_a_template_with_tools_of_an_unknown_way_asks_for_a_name(tokenizer):
    formats = AnswerFormats.choose(ChatTemplate(TOOLS), tokenizer)
    assert formats.tools is None
    assert "--tool-parser" in formats.why_no_tools
    assert AnswerFormats.choose(ChatTemplate(TOOLS), tokenizer, tools="hermes").tools is not None


def test_a_parser_needs_a_template(tokenizer):
    assert AnswerFormats.choose(None, tokenizer).tools is None
    for options in ({"tools": "hermes"}, {"reasoning": "qwen3"}):
        with pytest.raises(ConfigError, match="no chat template"):
            AnswerFormats.choose(None, tokenizer, **options)
