import asyncio
import threading
import time

import pytest

from firsttoken.core.errors import InvalidRequest
from firsttoken.text.chat_template import ChatTemplate
from firsttoken.text.pace import Pace
from firsttoken.text.pool import INLINE_NS, LARGE, TextPool
from firsttoken.text.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"


@pytest.fixture
def pool(byte_tokenizer: Tokenizer):
    template = ChatTemplate(TEMPLATE)
    pace = Pace.measure(byte_tokenizer, template)
    pool = TextPool(byte_tokenizer, template, workers=2, max_chars=8 << 20, pace=pace)
    yield pool
    pool.close()


async def test_a_chat_becomes_text_ids_and_stamps(pool: TextPool, byte_tokenizer: Tokenizer) -> None:
    prompt = await pool.render_and_encode([{"role": "user", "content": "Hi"}])
    assert prompt.text == "<|im_start|>user: Hi<|im_end|>"
    assert prompt.ids == byte_tokenizer.encode(prompt.text, add_special_tokens=False)
    assert 0 < prompt.templated_ns <= prompt.tokenized_ns


async def test_a_template_that_writes_bos_gives_exactly_one(vocabulary) -> None:
    from firsttoken.checkpoint.model_config import TokenizerSpec

    tokenizer = Tokenizer.build(TokenizerSpec(gguf=vocabulary, add_bos=True))
    pool = TextPool(tokenizer, ChatTemplate("{{ bos_token }}{{ messages[0].content }}", bos_token="<|endoftext|>"))
    chat = await pool.render_and_encode([{"role": "user", "content": "Hi"}])
    completion = await pool.encode("Hi")
    assert chat.ids == completion.ids
    assert list(chat.ids).count(0) == 1
    pool.close()


async def test_options_reach_the_tokenizer_and_the_template(pool: TextPool, byte_tokenizer: Tokenizer) -> None:
    plain = await pool.encode("<|im_start|>", parse_special=False, add_special_tokens=False)
    assert plain.ids == byte_tokenizer.encode("<|im_start|>", parse_special=False)
    with pytest.raises(InvalidRequest, match="chat_template"):
        await pool.render_and_encode([{"role": "user", "content": "Hi"}], template_kwargs={"chat_template": "x"})
    with pytest.raises(InvalidRequest, match="tools"):
        await pool.render_and_encode([{"role": "user", "content": "Hi"}], tools=[{"type": "function"}])


async def test_without_a_template_chat_is_refused(byte_tokenizer: Tokenizer) -> None:
    pool = TextPool(byte_tokenizer, None)
    with pytest.raises(InvalidRequest, match="no chat template"):
        await pool.render_and_encode([{"role": "user", "content": "Hi"}])
    pool.close()


@pytest.mark.clock
async def test_what_cannot_fit_is_refused_before_any_work(byte_tokenizer: Tokenizer) -> None:
    pool = TextPool(byte_tokenizer, ChatTemplate(TEMPLATE), max_chars=1000)
    huge = "x" * 5_000_000
    threads = threading.active_count()
    began = time.perf_counter()
    for call, param in (
        (pool.encode(huge), "prompt"),
        (pool.render_and_encode([{"role": "user", "content": huge}]), "messages"),
        (pool.render_and_encode([{"role": "user", "content": [{"type": "text", "text": huge}]}]), "messages"),
    ):
        with pytest.raises(InvalidRequest, match="5000000 characters") as caught:
            await call
        assert caught.value.param == param
        assert len(caught.value.message) < 300
    assert time.perf_counter() - began < 0.1
    assert threading.active_count() < threads + 20
    pool.close()


async def test_invalid_unicode_names_the_field(pool: TextPool) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await pool.encode("a\ud800", param="prompt[3]")
    assert caught.value.param == "prompt[3]"


@pytest.mark.clock
async def test_a_large_prompt_neither_blocks_the_loop_nor_delays_a_small_one(pool: TextPool) -> None:
    large = asyncio.ensure_future(pool.encode("The lazy dog doesn't mind. " * 20_000))
    also_large = asyncio.ensure_future(pool.encode("x" * LARGE))
    await asyncio.sleep(0.01)
    gaps, small = [], []
    while not large.done():
        began = time.perf_counter()
        await pool.encode("Hello there")
        small.append(time.perf_counter() - began)
        began = time.perf_counter()
        await asyncio.sleep(0)
        gaps.append(time.perf_counter() - began)
    assert len(small) > 20  # small prompts kept passing while the large one was being worked on
    assert sorted(small)[len(small) // 2] < 0.02
    assert max(gaps) < 0.2
    assert len((await large).ids) > 100_000
    assert (await also_large).ids


async def test_work_whose_caller_left_is_dropped(byte_tokenizer: Tokenizer) -> None:
    started: list[str] = []
    release = threading.Event()

    class Slow:
        max_token_chars = 10
        control_tokens = byte_tokenizer.control_tokens

        def encode(self, text: str, **options: bool):
            started.append(text)
            release.wait(5)
            return byte_tokenizer.encode(text, **options)

    pool = TextPool(Slow(), None, workers=1)  # type: ignore[arg-type]
    first = asyncio.ensure_future(pool.encode("first"))
    second = asyncio.ensure_future(pool.encode("second"))
    await asyncio.sleep(0.05)
    second.cancel()
    await asyncio.sleep(0)
    release.set()
    assert (await first).ids
    await pool.encode("third")
    assert started == ["first", "third"]
    pool.close()


CHAT = [{"role": "user", "content": "Hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
LONG = "x" * 1000
TOOL = [{"type": "function"}]
SHORT = Pace(byte_ns=INLINE_NS / 100, chat_ns=0, message_ns=0)


@pytest.mark.parametrize(
    ("pace", "ask", "inline"),
    [
        (SHORT, lambda pool: pool.encode("x" * 100), True),
        (SHORT, lambda pool: pool.encode("x" * 101), False),
        (SHORT, lambda pool: pool.encode("x" * 10, batch=11), False),
        (SHORT, lambda pool: pool.encode("x", parse_special=False), True),
        (SHORT, lambda pool: pool.render_and_encode(CHAT), True),
        (SHORT, lambda pool: pool.render_and_encode(PARTS), False),
        (SHORT, lambda pool: pool.render_and_encode([{"role": "user", "content": LONG}]), False),
        (SHORT, lambda pool: pool.render_and_encode(CHAT, tools=TOOL), False),
        (SHORT, lambda pool: pool.render_and_encode(CHAT, template_kwargs={"enable_thinking": True}), True),
        (SHORT, lambda pool: pool.render_and_encode(CHAT, template_kwargs={"words": ["x"]}), False),
        (None, lambda pool: pool.encode("x"), False),
        (None, lambda pool: pool.render_and_encode(CHAT), False),
    ],
)
async def test_only_what_is_known_to_be_short_is_done_in_the_loop(
    byte_tokenizer: Tokenizer, monkeypatch, pace: Pace | None, ask, inline: bool
) -> None:
    threads = []
    encode = Tokenizer.encode

    def watched(*args, **options):
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(*args, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    template = ChatTemplate("{{ tools }}" + TEMPLATE)
    pool = TextPool(byte_tokenizer, template, pace=pace)
    assert (await ask(pool)).ids
    assert threads == [inline]
    pool.close()
