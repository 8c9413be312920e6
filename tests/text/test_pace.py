import pytest

from firsttoken.text.chat_template import ChatTemplate
from firsttoken.text.pace import NEVER_NS, Pace
from firsttoken.text.tokenizer import Tokenizer

PACE = Pace(byte_ns=100, chat_ns=10_000, message_ns=1000)
LIMIT = 50_000


class Unread(str):
    """A text that must not be looked at."""

    __slots__ = ()

    def encode(self, *_: str) -> bytes:
        raise AssertionError("it was read to its end")


@pytest.mark.parametrize(("text", "ns"), [("", 0), ("a" * 10, 1000), ("é" * 10, 2000), ("\U0001f98a\ud800", 700)])
def test_a_text_takes_by_its_bytes(text: str, ns: float) -> None:
    assert PACE.of_text(text, LIMIT) == ns


def test_a_text_over_the_limit_is_not_even_read() -> None:
    assert PACE.of_text(Unread("a" * 501), LIMIT) == NEVER_NS


def test_a_chat_takes_by_its_messages_and_texts() -> None:
    messages = [{"role": "system", "content": "a" * 100}, {"role": "user", "content": "é"}]
    assert PACE.of_chat(messages, LIMIT) == 10_000 + 2 * 1000 + 101 * 100 + 100


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "user", "content": Unread("a" * 501)},
    ],
)
def test_what_is_more_than_short_texts_gets_no_estimate(message: dict) -> None:
    assert PACE.of_chat([{"role": "user", "content": "a"}, message], LIMIT) == NEVER_NS


def test_a_long_chat_is_not_walked_to_its_end() -> None:
    # After 40 messages the limit is passed; the one behind them would be an error.
    assert PACE.of_chat([{"role": "user", "content": ""}] * 41 + [None], LIMIT) == NEVER_NS  # type: ignore[list-item]


def test_a_pace_is_measured(byte_tokenizer: Tokenizer) -> None:
    loop = ChatTemplate("{% for m in messages %}{% for _ in range(200) %}x{% endfor %}{{ m.content }}{% endfor %}")
    pace = Pace.measure(byte_tokenizer, loop)
    assert 1 < pace.byte_ns < 100_000
    assert pace.message_ns > 5000, "two hundred turns of a loop"
    assert pace.chat_ns >= pace.message_ns / 2
    for no_chat in (None, ChatTemplate("{{ raise_exception('not these messages') }}")):
        refused = Pace.measure(byte_tokenizer, no_chat)
        assert refused.byte_ns < 100_000
        assert refused.of_chat([{"role": "user", "content": ""}], LIMIT) == NEVER_NS
