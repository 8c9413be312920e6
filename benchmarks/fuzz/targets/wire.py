"""What leaves a server as events, what reads events, and what engine and front end say to each other."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from benchmarks.fuzz.pieces import Pieces
from firsttoken.bench.http.events import EventStream
from firsttoken.diagnose.events import EventReader
from firsttoken.server.encode import ChunkWriter, chat_text_choice, text_choice, to_json, usage
from firsttoken.transport.framing import FrameError, FrameReader, frame
from firsttoken.transport.messages import ENCODER, FROM_ENGINE, TO_ENGINE


def written_events(data: bytes) -> None:
    """Each text is one event whose JSON holds it, however it looks."""
    pieces = Pieces(data)
    chat, last, always, index = pieces.below(2), pieces.below(2), pieces.below(2), pieces.below(130)
    name = pieces.take(pieces.below(16)).decode("utf-8", "replace")
    writer = ChunkWriter(
        id_=name,
        kind="chunk",
        created=1,
        model=name,
        service_tier="default",
        text_choice=chat_text_choice if chat else text_choice,
        usage_last=bool(last),
        usage_always=bool(always),
    )
    text = pieces.rest().decode("utf-8", "replace")
    before, after = writer.frame(index)
    events = before + to_json(text) + after
    events += writer.last(usage(1, 2, 0), {"total_ms": 1.0} if always else None)
    # A line ends at CR, LF or both, and an event at an empty line: neither may come from a text.
    blocks = events.decode("utf-8").split("\n\n")
    assert blocks[-1] == ""
    assert "\r" not in events.decode("utf-8")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1]), blocks
    told = json.loads(blocks[0].removeprefix("data: "))
    choice = told["choices"][0]
    assert (choice["delta"]["content"] if chat else choice["text"]) == text
    assert (choice["index"], told["model"], told["id"]) == (index, name, name)
    assert blocks[-2] == "data: [DONE]"
    assert len(blocks) == 3 + last
    if last:
        assert json.loads(blocks[1].removeprefix("data: "))["choices"] == []


def read_events(data: bytes) -> None:
    """Pieces change nothing, and both readers of events agree where lines end as servers end them."""
    pieces = Pieces(data)
    cuts = pieces.below(8)
    sizes = Pieces(pieces.take(cuts))
    raw = pieces.rest()
    cut = list(sizes.cut(raw, cuts))
    whole, parts = EventStream(), EventStream()
    expected = whole.feed(raw)
    found = [event for piece in cut for event in parts.feed(piece)]
    assert found == expected, f"{found} is not {expected}"
    once, reader = EventReader(), EventReader()
    assert [one for piece in cut for one in reader.feed(piece)] == once.feed(raw)


_WORDS = (
    *("type", "submit", "abort", "shutdown", "ready", "step", "refused", "failed", "requests", "ids", "params", "id"),
    *("n", "temperature", "stop", "logit_bias", "max_tokens", "seed", "message", "info", "deltas", "stats", "prompt"),
)


def _msgpack(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except OverflowError:  # it has no numbers of more than 64 bits
        return b""


def transport(data: bytes) -> None:
    """Frames come out as they went in, and what is no message raises nothing but what the channel expects."""
    pieces = Pieces(data)
    cuts = pieces.below(8)
    sizes = Pieces(pieces.take(cuts))
    raw = pieces.rest()
    payloads = [raw[: len(raw) // 2], raw[len(raw) // 2 :], b""]
    sent = b"".join(frame(payload) for payload in payloads)
    reader = FrameReader()
    assert [one for piece in sizes.cut(sent, cuts) for one in reader.feed(piece)] == payloads
    try:
        found = FrameReader().feed(raw)
        assert all(len(one) <= len(raw) for one in found)
    except FrameError:
        pass
    made = _msgpack(Pieces(raw).value(_WORDS, 5))
    for decoder, payload in ((TO_ENGINE, raw), (FROM_ENGINE, raw), (TO_ENGINE, made), (FROM_ENGINE, made)):
        try:
            message = decoder.decode(payload)
        except msgspec.DecodeError:
            continue
        again = ENCODER.encode(message)
        assert ENCODER.encode(decoder.decode(again)) == again
