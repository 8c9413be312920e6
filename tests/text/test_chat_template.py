import contextlib
import json
import time
import tracemalloc

import pytest

from firsttoken.core.errors import CheckpointError, InvalidRequest
from firsttoken.text import template_sandbox
from firsttoken.text.chat_template import ChatTemplate

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "Hi"}]


def test_renders_a_conversation() -> None:
    template = ChatTemplate(CHATML)
    assert template.render(USER) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(USER, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"
    assert template.reads == {"messages", "add_generation_prompt"}


@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        "{{ bos_token }}{%- for m in messages if m.role != 'system' %}\n  {{- m.content | trim }}\n{% endfor %}",
        "{% for m in messages %}{% if loop.last %}{{ m.content ~ '|' ~ loop.length }}{% else %}{{ loop.index0 }}, "
        "{% endif %}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}"
        "{% if ns.n > 2 %}{% break %}{% endif %}{{ m.role.upper()[:3] }}"
        "{{ m.content.replace('o', '0').split('l')[-1].strip() }}{% endfor %}",
        "{{ messages | map(attribute='content') | join(', ') }}{{ messages | tojson }}"
        "{{ messages | tojson(indent=2) }}",
        "{% macro show(m, end='!') %}<{{ m.role }}>{{ m.content }}{{ end }}{% endmacro %}"
        "{% for m in messages %}{{ show(m) }}{{ show(m, end='?') }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{% for m in messages | selectattr('role', 'equalto', 'user') | list %}{{ '%s:%d' % (m.content, 3) }}"
        "{{ '{} {}'.format(m.role, 1) }}{% endfor %}{{ messages | length }}{{ tools is none }}",
        "{% for key, value in messages[0].items() %}{{ key }}={{ value | string | indent(2) }}{% endfor %}",
        "{% if messages[0].content is string and 'H' in messages[0].content and enable_thinking %}yes{% endif %}",
        "{% for m in messages %}{{ ','.join([m.role, m.content]) }}{{ m.content.startswith('H') }}"
        "{% else %}-{% endfor %}",
    ],
)
def test_equals_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [*USER, {"role": "assistant", "content": " Hello\nöü <b> & 'q' "}, {"role": "user", "content": "And?"}]
    expected, _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True, bos_token="<s>", enable_thinking=True
    )
    template = ChatTemplate(source, bos_token="<s>")
    assert template.render(messages, template_kwargs={"enable_thinking": True}) == expected[0]


def test_json_keeps_order_and_is_not_escaped() -> None:
    tools = [{"type": "function", "function": {"name": "z", "a": "<ö'>"}}]
    template = ChatTemplate("{{ tools | tojson }}")
    assert template.render(USER, tools=tools) == json.dumps(tools, ensure_ascii=False)


def test_special_tokens_are_variables() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", bos_token="<s>")
    assert template.render(USER) == "<s>Hi"


def test_a_template_that_raises_refuses_the_messages_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render(USER)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ nothing.at.all }}", "{{ 1 + messages }}", "{{ 'a' - 1 }}", "{{ 1 // 0 }}"])
def test_a_template_that_fails_is_a_refusal_not_a_crash(source: str) -> None:
    with pytest.raises(InvalidRequest, match="failed on these messages"):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize("source", ["{% for %}", "{{ x | nofilter }}", "{% endif %}", "x" * 300_000, "{{" + "(" * 5000])
def test_a_source_that_is_no_template_is_refused_at_load(source: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        ChatTemplate(source)
    assert caught.value.field == "chat_template"


def test_tools_need_a_template_that_reads_them() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(CHATML).render(USER, tools=[{"type": "function"}])
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    "name", ["chat_template", "messages", "tools", "add_generation_prompt", "bos_token", "range", "raise_exception"]
)
def test_a_request_cannot_replace_the_template_or_its_world(name: str) -> None:
    bomb = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(CHATML).render(USER, template_kwargs={name: bomb})
    assert caught.value.param == f"chat_template_kwargs.{name}"


# ------------------------------------------------------------------ bounds

_DOUBLE = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x | length }}"

BOMBS = {
    "wide loops": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}",
    "silent loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "loops over messages": "".join(f"{{% for m{n} in messages %}}" for n in range(8)) + "x" + "{% endfor %}" * 8,
    "long string": "{{ 'a' * 10 ** 9 }}",
    "long list": "{{ ([1] * 10 ** 9) | length }}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "tilde": _DOUBLE.replace("STEP", "ns.x ~ ns.x"),
    "plus": _DOUBLE.replace("STEP", "ns.x + ns.x"),
    "replace method": _DOUBLE.replace("STEP", "ns.x.replace('a', ns.x)"),
    "replace filter": _DOUBLE.replace("STEP", "ns.x | replace('a', ns.x)"),
    "join method": _DOUBLE.replace("STEP", "ns.x.join([ns.x, ns.x])"),
    "join filter": _DOUBLE.replace("STEP", "[ns.x, ns.x] | join"),
    "format": _DOUBLE.replace("STEP", "'%s%s' % (ns.x, ns.x)"),
    "format method": _DOUBLE.replace("STEP", "'{}{}'.format(ns.x, ns.x)"),
    "list in list": _DOUBLE.replace("STEP", "[ns.x, ns.x]").replace("length", "string"),
    "list in list as JSON": _DOUBLE.replace("STEP", "[ns.x, ns.x]").replace("length", "tojson"),
    "set block": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "doubling macro": "{% macro f(n) %}{% if n < 40 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}{{ f(0) }}",
    "recursive loop": "{% for a in [[1, 2]] recursive %}{{ loop(range(9999) | map('string') | map('list') | list) }}"
    "{% endfor %}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent width argument": "{{ '%*d' % (1000000000, 1) }}",
    "format width": "{{ '{:>1000000000}'.format(1) }}",
    "format width argument": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "padding": "{{ 'x'.ljust(10 ** 9) }}",
    "date width": "{{ strftime_now('%999999999d') }}",
    "rounding": "{{ 1.5 | round(10 ** 8, 'ceil') }}",
    "mapped replace": "{{ range(9999) | map('replace', '', 'x' * 1000) | join }}",
    "indent": "{{ ('x\n' * 9000) | indent(1000) }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_wants_too_much_is_stopped(name: str) -> None:
    template = ChatTemplate(BOMBS[name])
    tracemalloc.start()
    began = time.thread_time()
    try:
        with pytest.raises(InvalidRequest):
            template.render(USER * 20)
        seconds, peak = time.thread_time() - began, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seconds < 3  # of which tracemalloc is most: untraced it is under 0.1
    assert peak < 64 << 20


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace.__init__.__globals__['os'] }}",
        "{{ ''['__class__'] }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ lipsum() }}",
    ],
)
def test_python_is_out_of_reach(source: str) -> None:
    with contextlib.suppress(InvalidRequest):
        assert ChatTemplate(source).render(USER) == ""  # an unsafe attribute is undefined, which prints as nothing


def test_a_long_honest_conversation_fits() -> None:
    messages = [{"role": ("user", "assistant")[n % 2], "content": "word " * 40} for n in range(5000)]
    assert len(ChatTemplate(CHATML).render(messages)) > 5000 * 200
    assert len(ChatTemplate(CHATML).render([{"role": "user", "content": "x" * 5_000_000}])) > 5_000_000


def test_messages_are_copies() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    ChatTemplate(CHATML).render([message])
    assert message == {"role": "user", "content": [{"type": "text", "text": "a"}]}


def test_an_item_is_found_by_its_name_and_a_dicts_own_method_goes_before_it() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }},{{ m.absent }},{{ m.get('content') }}{% endfor %}")
    assert template.render(USER) == "user,,Hi"
    shadow = ChatTemplate("{{ given.keys() | list | join }}{{ given.__class__ }}")
    assert (
        shadow.render(USER, template_kwargs={"given": {"keys": "not this", "__class__": "nor this"}}) == "keys__class__"
    )


def test_the_clock_of_a_render_is_read_only_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    def clock() -> int:
        reads.append(1)
        return len(reads) * 10**12

    monkeypatch.setattr(template_sandbox, "thread_time_ns", clock)
    template = ChatTemplate("{% for n in range(count) %}{{ n }}{% endfor %}")
    assert template.render(USER, template_kwargs={"count": 3}) == "012"
    assert not reads
    with pytest.raises(InvalidRequest, match="too long"):
        template.render(USER, template_kwargs={"count": 1000})
    assert len(reads) == 2
