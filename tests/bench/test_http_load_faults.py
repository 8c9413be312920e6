"""What servers do wrong, byte by byte: each fault is a reason, and what was right is measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from itertools import pairwise

import pytest

from firsttoken.bench.arrivals import Arrival, Burst, Mix
from firsttoken.bench.errors import BenchFailed
from firsttoken.bench.http.load import measure_http
from firsttoken.bench.http.server import Answered, Server, find_server
from firsttoken.bench.http.target import Target
from firsttoken.bench.shape import Load
from firsttoken.core.errors import ConfigError
from firsttoken.observability.percentiles import percentile
from tests.support.certificate import Certificate
from tests.support.faulty_server import (
    CLOSING_HEAD,
    DONE,
    END,
    HEAD,
    Answer,
    Ask,
    Cut,
    FaultyServer,
    Step,
    chunk,
    event,
    good,
    plain,
    token,
    usage,
)

pytestmark = pytest.mark.clock

OUTPUT = 4


async def find(server: FaultyServer, *, chat: bool = False, text: bool = False, timeout_s: float = 20.0) -> Server:
    target = Target.parse(server.url)
    return await find_server(target, model=None, chat=chat, text=text, api_key="k", timeout_s=timeout_s)


async def ask_once(answer: Answer, timeout_s: float = 20.0) -> Answered:
    """One request of `OUTPUT` tokens to a server that was good while it was tried."""
    faulty = FaultyServer()
    async with faulty.running():
        server = await find(faulty, timeout_s=timeout_s)
        faulty.answer = answer
        try:
            return await server.ask(server.encode([1, 2, 3], OUTPUT), Arrival(0.0, 3, OUTPUT))
        finally:
            server.pool.close()


def body(*events: bytes) -> bytes:
    return b"".join(map(chunk, events))


WHOLE = [token("x") for _ in range(OUTPUT - 1)] + [token("x", "length"), DONE]

FAULTS: list[tuple[str, list[Step], str]] = [
    ("a refusal", [plain(429, b'{"error": {"code": "overloaded", "message": "wait 3 s"}}')], "HTTP 429: overloaded"),
    ("an error page", [plain(502, b"<html>bad gateway</html>", "text/html")], "HTTP 502"),
    ("a page", [plain(200, b"<html>hi</html>", "text/html")], "the answer is text/html, not text/event-stream"),
    ("no stream", [plain(200, b'{"choices": []}')], "the answer is application/json, not text/event-stream"),
    (
        "an error in it",
        [HEAD, body(token(), event(error={"type": "server_error"})), END],
        "in-band error: server_error",
    ),
    ("no JSON", [HEAD, body(token(), b"data: {'a'}\n\n"), END], "an event that is not JSON"),
    ("nothing", [HEAD, END], "an empty stream"),
    ("only the end mark", [HEAD, body(DONE), END], "an empty stream"),
    ("no reason", [HEAD, body(token(), token(), DONE), END], "no finish_reason"),
    ("an abort", [HEAD, body(token(), token("x", "abort"), DONE), END], "finish_reason 'abort'"),
    (
        "a lie",
        [HEAD, body(token(), token("x", "length"), DONE), END],
        "fewer tokens than asked for, with finish_reason",
    ),
    ("too much", [HEAD, body(*[token()] * 5, token("x", "stop")), END], "more tokens than asked for"),
    ("cut", [HEAD, body(token(), token()), Cut()], "the answer was cut: the connection was closed before its end"),
    ("cut in an event", [HEAD, body(token(), b"data: {"), Cut()], "the answer was cut"),
    ("cut in a chunk", [HEAD, b"ff\r\ndata: ", Cut()], "the answer was cut"),
    ("cut in the head", [b"HTTP/1.1 200", Cut()], "the answer was cut"),
    ("closed", [Cut()], "the connection was closed before any answer"),
    ("closing, no reason", [CLOSING_HEAD, token(), token(), Cut()], "no finish_reason"),
    ("no HTTP", [b"SSH-2.0-OpenSSH\r\n"], "not HTTP/1.1"),
]


@pytest.mark.parametrize(("steps", "reason"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
async def test_each_fault_has_a_reason(steps: list[Step], reason: str) -> None:
    found = await ask_once(lambda ask: steps)
    assert found.error is not None
    assert found.error.startswith(reason)
    assert not found.ok


async def test_a_stall_is_a_time_out_and_tokens_before_it_count() -> None:
    found = await ask_once(lambda ask: [HEAD, body(token(), token()), 30.0], timeout_s=0.3)
    assert found.error == "time-out"
    assert found.tokens == 2


async def test_a_silent_server_is_a_time_out() -> None:
    assert (await ask_once(lambda ask: [30.0], timeout_s=0.2)).error == "time-out"


RIGHT: list[tuple[str, list[Step]]] = [
    ("plain", [HEAD, body(*WHOLE), END]),
    ("one chunk", [HEAD, chunk(b"".join(WHOLE)) + END]),
    ("byte by byte", [HEAD, *[chunk(bytes([byte])) for byte in b"".join(WHOLE)], END]),
    ("until closed", [CLOSING_HEAD, b"".join(WHOLE), Cut()]),
    ("no end mark", [HEAD, body(*WHOLE[:-1]), END]),
    ("closed after the end mark", [HEAD, body(*WHOLE), Cut()]),
    ("CRLF", [HEAD, chunk(b"".join(WHOLE).replace(b"\n", b"\r\n")), END]),
    ("comments", [HEAD, body(b": ping\n\n", *WHOLE), END]),
    ("100 first", [b"HTTP/1.1 100 Continue\r\n\r\n", HEAD, body(*WHOLE), END]),
]


@pytest.mark.parametrize("steps", [right[1] for right in RIGHT], ids=[right[0] for right in RIGHT])
async def test_what_is_whole_is_no_fault(steps: list[Step]) -> None:
    found = await ask_once(lambda ask: steps)
    assert found.error is None
    assert found.tokens == OUTPUT


async def test_an_answer_split_at_any_byte_is_the_same() -> None:
    raw = HEAD + body(*WHOLE) + END
    faulty = FaultyServer()
    async with faulty.running():
        server = await find(faulty)
        for place in range(1, len(raw), 7):
            # The second part in a turn of its own: what lies between is a read of the client's.
            faulty.answer = lambda ask, place=place: [raw[:place], 0.0005, raw[place:]]
            found = await server.ask(server.encode([1], OUTPUT), Arrival(0.0, 1, OUTPUT))
            assert (found.error, found.tokens, found.finish_reason) == (None, OUTPUT, "length"), place
        server.pool.close()


async def test_an_idle_connection_that_was_closed_is_no_fault() -> None:
    faulty = FaultyServer()

    def closes_the_second(ask: Ask) -> Iterable[Step]:
        if len(faulty.asks) % 2:
            return list(good(ask))
        return [Cut()]

    async with faulty.running():
        server = await find(faulty)
        faulty.asks.clear()
        faulty.answer = closes_the_second
        for _ in range(2):
            found = await server.ask(server.encode([1], OUTPUT), Arrival(0.0, 1, OUTPUT))
            assert found.error is None
        assert server.pool.reopened == 1
        server.pool.close()


async def test_no_connection() -> None:
    faulty = FaultyServer()
    async with faulty.running():
        server = await find(faulty)
        server.pool.close()
    found = await server.ask(server.encode([1], OUTPUT), Arrival(0.0, 1, OUTPUT))
    assert found.error is not None
    assert found.error.startswith("no connection: ")
    with pytest.raises(BenchFailed, match="Is the server running there"):
        await find(faulty)


# ---------------------------------------------------------------- what a server takes


async def test_what_the_server_refuses_is_left_out() -> None:
    def picky(ask: Ask) -> Iterable[Step]:
        if not isinstance(ask.body["prompt"], str):
            return [plain(422, b'{"detail": "prompt must be a string"}')]
        if "ignore_eos" in ask.body:
            return [plain(400, b'{"error": {"message": "unknown field ignore_eos"}}')]
        if "continuous_usage_stats" in ask.body.get("stream_options", {}):
            return [plain(400, b'{"error": {"message": "stream_options.continuous_usage_stats is unknown"}}')]
        return good(ask)

    faulty = FaultyServer(picky)
    async with faulty.running():
        server = await find(faulty)
        assert server.dialect.model == "faulty"
        assert server.dialect.fields == ["include_usage", "temperature"]
        assert server.dialect.vocab is None
        # `good` counts characters as tokens: words are 3 to 7 of them with their space.
        assert 4 < server.words.each < 6
        assert faulty.asks[0].headers["authorization"] == "Bearer k"
        server.pool.close()


async def test_token_ids_are_asked_for_where_chunks_have_no_usage() -> None:
    def with_ids(ask: Ask) -> Iterable[Step]:
        wanted = ask.body["max_tokens"]
        ids = {"token_ids": list(range(wanted))} if ask.body.get("return_token_ids") else {}
        return [HEAD, chunk(event(choices=[{"text": "xyz", "finish_reason": "length", **ids}])), chunk(DONE) + END]

    faulty = FaultyServer(with_ids)
    async with faulty.running():
        server = await find(faulty)
        assert server.dialect.return_token_ids
        found = await server.ask(server.encode([1], OUTPUT), Arrival(0.0, 1, OUTPUT))
        assert (found.tokens, found.counted_by) == (OUTPUT, "token ids")
        server.pool.close()


@pytest.mark.parametrize(
    ("status", "message"), [(401, "give it by --api-key"), (404, "--chat for chat"), (400, "refuses the plainest")]
)
async def test_what_cannot_be_asked_is_said(status: int, message: str) -> None:
    async with FaultyServer(lambda ask: [plain(status, b'{"error": "no"}')]).running() as faulty:
        with pytest.raises(ConfigError, match=message):
            await find(faulty)


async def test_several_models_must_be_chosen_from() -> None:
    async with FaultyServer(models=("a", "b")).running() as faulty:
        with pytest.raises(ConfigError, match=r"2 models: say which by --model \(a, b\)"):
            await find(faulty)


# ---------------------------------------------------------------- loads


async def test_reasons_are_counted_and_the_good_ones_measured() -> None:
    faulty = FaultyServer()

    def mixed(ask: Ask) -> Iterable[Step]:
        kinds: list[list[Step]] = [
            list(good(ask)),
            [plain(503, b'{"error": {"code": "draining"}}')],
            [HEAD, body(token()), Cut()],
        ]
        return kinds[len(faulty.asks) % 3]

    async with faulty.running():
        server = await find(faulty)
        faulty.answer = mixed
        faulty.asks.clear()
        load = Load(mix=Mix((8,), (OUTPUT,)), burst=Burst(10, 0.2), seconds=0.55, warmup_s=0.0)
        found = await measure_http(server, load, "seed")
        server.pool.close()
    cut = "the answer was cut: the connection was closed before its end"
    assert found["requests"] == {
        "sent": 30,
        "ok": 10,
        "failed": 20,
        "short": 0,
        "reasons": {"HTTP 503: draining": 10, cut: 10},
    }
    assert found["tokens"]["output"] == 10 * OUTPUT + 10
    assert found["goodput_rps"] == found["requests_per_s"] == pytest.approx(10 / found["wall_s"])
    assert 0.4 < found["wall_s"] < 5


async def test_a_server_that_answers_nothing_gives_a_result_too() -> None:
    async with FaultyServer().running() as faulty:
        server = await find(faulty)
        faulty.answer = lambda ask: [plain(500, b"")]
        load = Load(mix=Mix((8,), (OUTPUT,)), concurrency=2, seconds=0.1, warmup_s=0.0, target_ttft_ms=10.0)
        found = await measure_http(server, load, "seed")
        server.pool.close()
    assert found["requests"]["ok"] == 0
    assert list(found["requests"]["reasons"]) == ["HTTP 500"]
    assert found["ttft_ms"] == {}
    assert found["targets"]["ttft_ms"] == {"target": 10.0, "p99": None, "met": False}


async def test_a_trace_shares_prompts_and_keeps_its_times() -> None:
    async with FaultyServer().running() as faulty:
        server = await find(faulty)
        faulty.asks.clear()
        faulty.written.clear()
        trace = (Arrival(0.0, 600, 2, (1, 2)), Arrival(0.2, 700, 3, (1, 3)), Arrival(9.0, 5, 1, (4,)))
        load = Load(mix=Mix((1,), (1,)), trace=trace, seconds=1.0, warmup_s=0.0)
        found = await measure_http(server, load, "seed")
        server.pool.close()
    first, second = (ask.body["prompt"] for ask in faulty.asks)
    assert found["requests"]["sent"] == 2
    assert [len(first), len(second)] == [600, 700]
    assert first[:512] == second[:512]
    assert first[512:520] != second[512:520]
    assert [ask.body["max_tokens"] for ask in faulty.asks] == [2, 3]
    gap_ms = (faulty.written[1][0] - faulty.written[0][0]) / 1e6
    assert 190 < gap_ms < 400


async def test_prompts_differ_between_seeds_and_within_a_load() -> None:
    async with FaultyServer().running() as faulty:
        server = await find(faulty)
        seen = []
        for seed in ("a", "b", "a"):
            faulty.asks.clear()
            await measure_http(
                server, Load(mix=Mix((8,), (1,)), burst=Burst(3, 1), seconds=0.1, warmup_s=0.0, seed=1), seed
            )
            seen.append([tuple(ask.body["prompt"]) for ask in faulty.asks])
        server.pool.close()
    assert seen[0] == seen[2]
    assert len({*seen[0], *seen[1]}) == 6


# ---------------------------------------------------------------- times


async def test_known_delays_are_recovered() -> None:
    """Against the instants at which the server wrote: on a busy machine its pauses are longer than they should be."""
    first_s, gap_s, tokens = 0.120, 0.030, 8

    def slow(ask: Ask) -> Iterable[Step]:
        yield HEAD
        for number in range(tokens):
            yield first_s if number == 0 else gap_s
            yield chunk(token("x", "length" if number == tokens - 1 else None))
        yield chunk(usage(3, tokens)) + chunk(DONE) + END

    async with FaultyServer().running() as faulty:
        server = await find(faulty)
        faulty.answer = slow
        faulty.written.clear()
        found = [await server.ask(server.encode([1], tokens), Arrival(0.0, 1, tokens)) for _ in range(6)]
        server.pool.close()
    late_ms = sorted(
        (came - written) / 1e6
        for one, stamps in zip(found, faulty.written, strict=True)
        for (came, _), written in zip(one.arrivals, stamps[1:], strict=False)
    )
    assert len(late_ms) == 6 * tokens
    assert late_ms[0] >= 0
    assert percentile(late_ms, 0.5) < 1.0
    true_ttfts = sorted((stamps[1] - one.sent_ns) / 1e6 for one, stamps in zip(found, faulty.written, strict=True))
    true_gaps = sorted((b - a) / 1e6 for stamps in faulty.written for a, b in pairwise(stamps[1 : tokens + 1]))
    ttft = percentile(sorted(one.ttft_ms for one in found), 0.5)
    gap = percentile(sorted(gap for one in found for gap in one.gaps_ms), 0.5)
    assert ttft == pytest.approx(percentile(true_ttfts, 0.5), rel=0.03, abs=1.0)
    assert gap == pytest.approx(percentile(true_gaps, 0.5), rel=0.03, abs=1.0)
    assert 1e3 * first_s <= ttft < 2e3 * first_s
    assert 1e3 * gap_s <= gap + 0.1 < 2e3 * gap_s


async def test_several_tokens_a_chunk_are_several_tokens() -> None:
    steps: list[Step] = [HEAD, 0.05, body(token("ab"), token("abcd", "length"), usage(3, OUTPUT), DONE), END]
    found = await ask_once(lambda ask: steps)
    assert found.error is None
    assert [count for _, count in found.arrivals] == [2, 2]
    assert found.counted_by == "usage at the end, by characters"
    assert found.gaps_ms[0] == 0


# ---------------------------------------------------------------- TLS


async def test_tls(certificate: Certificate) -> None:
    faulty = FaultyServer()
    async with faulty.running(certificate.context):
        url = f"https://127.0.0.1:{faulty.port}"

        async def tried(verify: bool) -> Server:
            target = Target.parse(url, verify=verify)
            return await find_server(target, model="m", chat=False, text=False, api_key=None, timeout_s=20)

        with pytest.raises(BenchFailed, match="the certificate is not trusted"):
            await tried(True)
        server = await tried(False)
        found = await server.ask(server.encode([1], OUTPUT), Arrival(0.0, 1, OUTPUT))
        assert (found.error, found.tokens) == (None, OUTPUT)
        server.pool.close()


# ---------------------------------------------------------------- the client itself


async def test_many_streams_at_once() -> None:
    def slow(ask: Ask) -> Iterable[Step]:
        for step in good(ask):
            yield step
            yield 0.05

    async with FaultyServer().running() as faulty:
        server = await find(faulty)
        faulty.answer = slow
        load = Load(mix=Mix((8,), (OUTPUT,)), concurrency=300, seconds=0.2, warmup_s=0.0)
        found = await measure_http(server, load, "seed")
        assert faulty.connections == 300  # the one that the server was tried by among them
        server.pool.close()
    assert found["requests"]["ok"] == found["requests"]["sent"] >= 300
    assert found["client"]["connections"] == 0, "they are opened before the clock starts"


async def test_a_client_that_is_late_says_so() -> None:
    async with FaultyServer().running() as faulty:
        server = await find(faulty)
        asyncio.get_running_loop().call_later(0.1, time.sleep, 0.2)
        load = Load(mix=Mix((8,), (1,)), rate=100, seconds=0.5, warmup_s=0.0)
        found = await measure_http(server, load, "seed")
        server.pool.close()
    assert 150 < found["late_ms"]["max"] < 400
    assert found["late_ms"]["p50"] < 100
    assert 150 < found["client"]["loop_lag_ms"]["max"] < 400
    # What the client did itself is no latency of the server's: the clock starts with the sending.
    assert found["ttft_ms"]["p50"] < 50
