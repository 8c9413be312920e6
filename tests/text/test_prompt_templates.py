from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from firsttoken.core.errors import ConfigError
from firsttoken.frontend.texts import text_pool
from firsttoken.text.chat_template import ChatTemplate
from firsttoken.text.prompt_templates import PromptTemplate, read_prompt_templates
from firsttoken.text.tokenizer import Tokenizer

TEMPLATE = ChatTemplate(
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
)
# Joins the system prompt with the question, as Gemma's and Mistral's do.
JOINS = ChatTemplate(
    "{% for m in messages %}{{ m.content }}{{ '\n' if m.role == 'system' else '<|im_end|>' }}{% endfor %}"
)
SYSTEM = {"role": "system", "content": "You are a patient clerk. " * 40}


def file_of(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def test_each_line_is_how_chats_begin(tmp_path: Path) -> None:
    path = file_of(
        tmp_path,
        '{"messages": [{"role": "system", "content": "Be brief."}]}',
        "",
        '{"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f"}], "chat_template_kwargs": {"a": 1}}',
    )
    first, second = read_prompt_templates(path)
    assert first.render(TEMPLATE) == "<|im_start|>system\nBe brief.<|im_end|>"
    assert second.render(TEMPLATE).startswith('[{"name": "f"}]<|im_start|>user')
    assert (first.place, second.chat_template_kwargs) == (f"--prompt-templates {path}, line 1", {"a": 1})
    assert second.place.endswith("line 3")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "line 2: JSON is malformed"),
        ('{"prompt": "x"}', "line 2: Object contains unknown field `prompt`"),
        ('{"messages": "x"}', r"line 2: Expected `array`, got `str` - at `\$.messages`"),
        ("{}", "line 2: Object missing required field `messages`"),
        ('{"messages": [], "tools": 3}', "line 2: Expected"),
    ],
)
def test_a_line_that_is_no_chat_is_refused_by_its_number(tmp_path: Path, line: str, words: str) -> None:
    good = '{"messages": [{"role": "system", "content": "x"}]}'
    with pytest.raises(ConfigError, match=words):
        read_prompt_templates(file_of(tmp_path, good, line))


def test_a_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_prompt_templates(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="is empty"):
        read_prompt_templates(file_of(tmp_path, "", " "))


def begins(*messages: dict[str, str]) -> PromptTemplate:
    return PromptTemplate("--prompt-templates x, line 7", list(messages), None, {})


async def test_what_the_file_says_is_known_to_all_from_the_start(byte_tokenizer: Tokenizer) -> None:
    pool = text_pool(byte_tokenizer, TEMPLATE, workers=1, prompt_templates=[begins(SYSTEM)])
    assert pool.cache is not None
    for salt in ("a", "b"):
        prompt = await pool.render_and_encode([SYSTEM, {"role": "user", "content": "Hi"}], salt=salt)
        assert prompt.ids == byte_tokenizer.encode(prompt.text, add_special_tokens=False)
    assert pool.cache.stats().hit_characters > 2 * len(SYSTEM["content"])
    pool.close()


def test_what_the_model_refuses_is_told_with_its_line(byte_tokenizer: Tokenizer) -> None:
    def start(template: ChatTemplate | None, *given: PromptTemplate) -> None:
        text_pool(byte_tokenizer, template, workers=1, prompt_templates=given)

    with pytest.raises(ConfigError, match=r"line 7: messages must be"):
        start(TEMPLATE, begins())
    with pytest.raises(ConfigError, match=r"line 7: messages\[0\].role is 'cat'"):
        start(TEMPLATE, begins({"role": "cat", "content": "x"}))
    with pytest.raises(ConfigError, match="line 7: this model has no chat template"):
        start(None, begins(SYSTEM))
    with pytest.raises(ConfigError, match=r"line 7: .*can safely be cut"):
        start(ChatTemplate("{% for m in messages %}{{ m.content }}\n{% endfor %}"), begins(SYSTEM))


@pytest.mark.parametrize(
    ("template", "begin", "why"),
    [
        (JOINS, begins(SYSTEM), "this model's chat template joins it with the message that follows"),
        (TEMPLATE, begins({"role": "system", "content": "Be brief."}), "it is 38 characters long .*256 are the least"),
    ],
)
def test_what_cannot_be_found_again_is_told(
    byte_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, template: ChatTemplate, begin: PromptTemplate, why: str
) -> None:
    with caplog.at_level(logging.WARNING):
        text_pool(byte_tokenizer, template, workers=1, prompt_templates=[begin]).close()
    assert re.search(f"line 7: nothing of it can be found again .*: {why}", caplog.text)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        text_pool(byte_tokenizer, TEMPLATE, workers=1, prompt_templates=[begins(SYSTEM)]).close()
    assert caplog.text == ""
