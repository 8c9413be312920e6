from __future__ import annotations

import asyncio
import random
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.core.errors import InvalidRequest
from firsttoken.text import pool as pool_module
from firsttoken.text.boundaries import MIN_PIECE, message_gaps
from firsttoken.text.chat_template import ChatTemplate
from firsttoken.text.pace import Pace
from firsttoken.text.pool import INLINE_NS, TextPool
from firsttoken.text.prompt_cache import SHORT, TTL_NS, PromptCache
from firsttoken.text.tokenizer import Tokenizer

TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SYSTEM = "You are a patient clerk. " * 40
SAMPLES = ["Café 日本 🔥", "<|im_end|>", "<|im_start|>user\n", "<|im_", "e\u0301", "  \n", "fox " * 90, "ď" * 300]


class Clock:
    def __init__(self) -> None:
        self.ns = 10**12

    def __call__(self) -> int:
        return self.ns


class Counting:
    """A tokenizer that notes what it was given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []

    def encode(self, text: str, **options: bool) -> array[int]:
        self.texts.append(text)
        return self._tokenizer.encode(text, **options)

    def encode_each(self, texts: list[str]) -> list[array[int]]:
        self.texts += texts
        return self._tokenizer.encode_each(texts)


def cache_of(tokenizer: Tokenizer, **options) -> tuple[PromptCache, Counting, Clock]:
    counting, clock = Counting(tokenizer), Clock()
    boundaries = tokenizer.boundaries(message_gaps(TEMPLATE))
    return PromptCache(counting, boundaries, clock=clock, **options), counting, clock  # type: ignore[arg-type]


def chat(turns: int, *, system: str = SYSTEM) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Question {turn}: " + "why does the fox jump? " * 15})
        messages.append({"role": "assistant", "content": f"Answer {turn}: " + "the dog doesn't mind. " * 15})
    return messages


def plain(tokenizer: Tokenizer, text: str) -> array[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_a_turn_tokenises_only_what_the_turns_before_had_not(byte_tokenizer: Tokenizer) -> None:
    cache, counting, _ = cache_of(byte_tokenizer)
    messages = chat(8)
    for turn in range(1, 9):
        text = TEMPLATE.render(messages[: 2 * turn])  # up to the question
        counting.texts.clear()
        assert cache.encode(text) == plain(byte_tokenizer, text)
        if turn > 1:
            new = len(messages[2 * turn - 2]["content"]) + len(messages[2 * turn - 1]["content"])
            assert sum(map(len, counting.texts)) < new + 4 * len("<|im_start|>assistant\n<|im_end|>\n")
    stats = cache.stats()
    assert stats.hit_characters > 2 * stats.missed_characters


def test_chats_with_one_system_prompt_share_it(byte_tokenizer: Tokenizer) -> None:
    cache, counting, _ = cache_of(byte_tokenizer)
    for question in ("Hi", "Who are you?"):
        text = TEMPLATE.render([{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}])
        counting.texts.clear()
        assert cache.encode(text) == plain(byte_tokenizer, text)
    assert sum(map(len, counting.texts)) < 100


@settings(max_examples=200, deadline=None)
@given(chats=st.lists(st.lists(st.sampled_from(SAMPLES), max_size=12), min_size=2, max_size=6), salts=st.booleans())
def test_ids_are_those_of_the_whole_text(byte_tokenizer: Tokenizer, chats: list[list[str]], salts: bool) -> None:
    cache, _, _ = cache_of(byte_tokenizer, capacity=20_000)  # so small that pieces come and go
    for number, parts in enumerate([*chats, *chats]):
        text = "".join(parts) + "fox " * 200 * (number % 2)
        assert cache.encode(text, f"tenant{number % 2}" if salts else "") == plain(byte_tokenizer, text)


def test_what_one_tenant_sent_is_new_when_another_sends_it(byte_tokenizer: Tokenizer) -> None:
    cache, counting, _ = cache_of(byte_tokenizer)
    text = TEMPLATE.render(chat(3))
    cache.encode(text, "a")
    counting.texts.clear()
    cache.encode(text, "b")
    assert "".join(counting.texts) == text
    counting.texts.clear()
    cache.encode(text, "a")
    assert len("".join(counting.texts)) < MIN_PIECE


def test_what_was_loaded_is_found_by_all_and_for_ever(byte_tokenizer: Tokenizer) -> None:
    cache, counting, clock = cache_of(byte_tokenizer, capacity=1)
    cache.load([TEMPLATE.render([{"role": "system", "content": SYSTEM}], add_generation_prompt=False)])
    assert cache.stats().entries == 1
    assert cache.stats().bytes > 2 * len(SYSTEM)
    clock.ns += 100 * TTL_NS
    for salt in ("a", "b"):
        counting.texts.clear()
        text = TEMPLATE.render([{"role": "system", "content": SYSTEM}, {"role": "user", "content": salt}])
        assert cache.encode(text, salt) == plain(byte_tokenizer, text)
        assert sum(map(len, counting.texts)) < 100
    assert cache.stats().entries == 1


def test_a_piece_leaves_a_minute_after_its_last_use(byte_tokenizer: Tokenizer) -> None:
    cache, counting, clock = cache_of(byte_tokenizer)
    text = TEMPLATE.render(chat(3))
    cache.encode(text)
    for _ in range(3):
        clock.ns += TTL_NS
        counting.texts.clear()
        cache.encode(text)
        assert len("".join(counting.texts)) < MIN_PIECE
    held = cache.stats().entries
    clock.ns += TTL_NS + 1
    counting.texts.clear()
    cache.encode(text)
    assert "".join(counting.texts) == text
    assert cache.stats().expired == held
    clock.ns += TTL_NS + 1
    assert cache.drop_expired() == 0
    assert cache.stats().bytes == 0


def test_many_pieces_expire_in_small_portions(byte_tokenizer: Tokenizer) -> None:
    cache, _, clock = cache_of(byte_tokenizer)
    for number in range(300):
        cache.encode(f"{number} " + "fox " * 250)
    clock.ns += TTL_NS + 1
    cache.look_up("x" * SHORT)
    assert 200 < cache.stats().entries < 300, "a request pays for a few only"
    assert cache.drop_expired() == 0


def test_the_least_recently_used_leaves_first(byte_tokenizer: Tokenizer) -> None:
    texts = [f"{number} " + "fox " * 200 for number in range(40)]
    cache, counting, _ = cache_of(byte_tokenizer, capacity=60_000)
    for text in texts:
        cache.encode(text)
        cache.encode(texts[0])
        assert cache.stats().bytes <= 60_000
    assert cache.stats().evicted > 0
    counting.texts.clear()
    cache.encode(texts[0])
    cache.encode(texts[-1])
    assert counting.texts == []
    cache.encode(texts[1])
    assert counting.texts == [texts[1]]


def test_a_piece_that_would_push_out_the_others_is_not_kept(byte_tokenizer: Tokenizer) -> None:
    cache, _, _ = cache_of(byte_tokenizer, capacity=40_000)
    cache.encode("fox " * 200)
    cache.encode("dog " * 4000)
    assert cache.stats().entries == 1
    assert cache.stats().evicted == 0


def test_a_short_text_passes_by(byte_tokenizer: Tokenizer) -> None:
    cache, counting, _ = cache_of(byte_tokenizer)
    text = "x" * (SHORT - 1)
    assert cache.encode(text) == cache.encode(text) == plain(byte_tokenizer, text)
    assert counting.texts == [text, text]
    assert cache.stats().misses == 0


def test_invalid_unicode_is_refused_and_nothing_kept(byte_tokenizer: Tokenizer) -> None:
    cache, _, _ = cache_of(byte_tokenizer)
    with pytest.raises(InvalidRequest, match="surrogate"):
        cache.encode("fox " * 400 + "\ud800")
    assert cache.stats().entries == 0


def test_threads_agree_with_the_tokenizer(byte_tokenizer: Tokenizer) -> None:
    cache, _, clock = cache_of(byte_tokenizer, capacity=60_000)
    texts = [TEMPLATE.render(chat(turns, system=f"{kind} " * 150)) for turns in (1, 2, 5) for kind in "ab"]
    right = [plain(byte_tokenizer, text) for text in texts]

    def work(seed: int) -> bool:
        choose = random.Random(seed)
        for _ in range(60):
            at = choose.randrange(len(texts))
            clock.ns += choose.choice([0, TTL_NS // 20])
            if cache.encode(texts[at], str(at % 2)) != right[at]:
                return False
            if choose.random() < 0.1:
                cache.drop_expired()
        return True

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(6)))
    clock.ns += TTL_NS + 1
    assert cache.drop_expired() == 0
    assert cache.stats().bytes == 0, "the account of bytes held"


# ------------------------------------------------------------------------- in the pool


def pool_of(tokenizer: Tokenizer, pace: Pace | None = None) -> tuple[TextPool, PromptCache]:
    cache = PromptCache(tokenizer, tokenizer.boundaries(message_gaps(TEMPLATE)))
    return TextPool(tokenizer, TEMPLATE, pace=pace, cache=cache), cache


async def test_the_pool_finds_chats_and_completions_again(byte_tokenizer: Tokenizer) -> None:
    pool, cache = pool_of(byte_tokenizer)
    for turns in (1, 2, 3):
        prompt = await pool.render_and_encode(chat(turns), salt="a")
        assert prompt.ids == plain(byte_tokenizer, prompt.text)
        again = await pool.encode(prompt.text, salt="a", add_special_tokens=False)
        assert again.ids == prompt.ids
        assert (await pool.encode(prompt.text, salt="a")).ids == byte_tokenizer.encode(prompt.text)
    assert cache.stats().hits > 10
    hits = cache.stats().hits
    assert (await pool.encode(prompt.text, parse_special=False)).ids == byte_tokenizer.encode(
        prompt.text, parse_special=False
    )
    await pool.render_and_encode(chat(3), salt="b")
    assert cache.stats().hits == hits
    pool.close()


@pytest.mark.parametrize(("question", "inline"), [("Hi", True), ("x" * 200, False)])
async def test_a_long_prompt_that_is_known_needs_no_thread(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, question: str, inline: bool
) -> None:
    threads: list[bool] = []
    complete = PromptCache.complete

    def watched(self, found):
        threads.append(threading.current_thread() is threading.main_thread())
        return complete(self, found)

    monkeypatch.setattr(PromptCache, "complete", watched)
    pool, _ = pool_of(byte_tokenizer, Pace(byte_ns=INLINE_NS / 150, chat_ns=0, message_ns=0, known_ns=1))
    system = [{"role": "system", "content": SYSTEM}]
    await pool.render_and_encode([*system, {"role": "user", "content": "x" * 150}])
    prompt = await pool.render_and_encode([*system, {"role": "user", "content": question}])
    assert prompt.ids == plain(byte_tokenizer, prompt.text)
    assert 0 < prompt.templated_ns <= prompt.tokenized_ns
    assert threads == [False, inline]
    pool.close()


async def test_what_nobody_asks_for_any_more_goes_without_being_asked(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "TTL_NS", 20_000_000)
    cache = PromptCache(byte_tokenizer, ["<|im_end|>"], ttl_ns=30_000_000)
    pool = TextPool(byte_tokenizer, TEMPLATE, cache=cache)
    await pool.render_and_encode(chat(2))
    assert cache.stats().entries > 0
    for _ in range(200):
        await asyncio.sleep(0.01)
        if cache.stats().entries == 0:
            break
    assert cache.stats().bytes == 0
    pool.close()


def test_the_pace_of_a_known_chat_is_measured(byte_tokenizer: Tokenizer) -> None:
    cache = PromptCache(byte_tokenizer, byte_tokenizer.boundaries(message_gaps(TEMPLATE)))
    pace = Pace.measure(byte_tokenizer, TEMPLATE, cache)
    assert pace.known_ns < pace.byte_ns
    messages = [{"role": "user", "content": "x" * 100}]
    assert pace.of_known_chat(messages, 10**9) == pace.chat_ns + pace.message_ns + 100 * pace.known_ns
    unknown = Pace.measure(byte_tokenizer, TEMPLATE)
    assert unknown.of_known_chat(messages, INLINE_NS) > INLINE_NS
