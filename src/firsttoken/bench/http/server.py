"""A server that is measured: which model it has, what it takes, and one measured request to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from firsttoken.bench.arrivals import Arrival
from firsttoken.bench.errors import BenchFailed
from firsttoken.bench.http.answer import WHOLE, CountedBy, error_words
from firsttoken.bench.http.connection import Exchange
from firsttoken.bench.http.dialect import VOCABULARIES, Dialect, Prompt
from firsttoken.bench.http.pool import NO_CONNECTION, Pool
from firsttoken.bench.http.prompts import WORDS, Prompts, Words
from firsttoken.bench.http.target import Target, request
from firsttoken.bench.requests import Timed
from firsttoken.core.clock import now_ns
from firsttoken.core.errors import ConfigError

PROBE_OUTPUT = 8
_PROBE_INPUT = 16
_PROBE_TIMEOUT_S = 60.0
_REFUSALS = frozenset({400, 405, 415, 422, 501})


@dataclass(slots=True)
class Answered(Timed):
    """A request over HTTP. ``input`` and ``output`` are what was asked for; an answer may be shorter where the server
    ends it by itself. ``prompt_tokens`` is what the server counted, if it told."""

    prompt_tokens: int | None = None
    finish_reason: str | None = None
    counted_by: CountedBy | None = None

    @property
    def ok(self) -> bool:
        """True for a whole answer."""
        return self.error is None

    @property
    def short(self) -> bool:
        return self.ok and self.tokens < self.output


@dataclass(frozen=True)
class Server:
    """Use `find_server`. ``words`` is how many tokens words are to it, where it takes text only."""

    target: Target
    dialect: Dialect
    pool: Pool
    timeout_s: float
    api_key: str | None = None
    words: Words = Words()  # noqa: RUF009  # frozen

    @property
    def prompts(self) -> str:
        """What prompts are made of."""
        if self.dialect.vocab is not None:
            return f"token ids below {self.dialect.vocab}"
        return f"words, {self.words.each:.3f} tokens each, and {self.words.fixed:.1f} tokens of the server's own"

    def encode(self, prompt: Prompt, output: int) -> bytes:
        """The bytes of a whole request."""
        head = self.target.head("POST", self.dialect.route, self.api_key)
        return request(head, self.dialect.body(prompt, output))

    async def ask(self, encoded: bytes, arrival: Arrival) -> Answered:
        """Send a request that `encode` made. What the server refuses or fails is noted, not raised.

        The time runs from this call on: where there is no free connection, opening one is part of it.
        """
        found = Answered(arrival.input, arrival.output, sent_ns=now_ns())
        exchange = await self.pool.ask(encoded, self.timeout_s)
        answer = exchange.answer
        found.arrivals, found.counted_by = answer.arrivals()
        found.prompt_tokens, found.finish_reason = answer.prompt_tokens, answer.finish_reason
        found.error = verdict(exchange, found.tokens, arrival.output)
        return found


def verdict(exchange: Exchange, tokens: int, asked: int) -> str | None:
    """Why an answer is not whole; None when it is. The same words for the same fault, so that they can be counted."""
    answer = exchange.answer
    if exchange.status not in (0, 200):
        return f"HTTP {exchange.status}{_plain_words(exchange.plain)}"
    if answer.error is not None:
        return answer.error
    if exchange.fault is not None and not answer.complete:
        return exchange.fault
    if not exchange.streams:
        kind = exchange.content_type or "of no content type"
        return f"the answer is {kind}, not text/event-stream{_plain_words(exchange.plain)}"
    if tokens == 0:
        return "an empty stream"
    if answer.finish_reason is None:
        return "no finish_reason"
    if answer.finish_reason not in WHOLE:
        return f"finish_reason {answer.finish_reason!r:.40}"
    if tokens > asked:
        return "more tokens than asked for"
    if answer.finish_reason == "length" and tokens < asked:
        return "fewer tokens than asked for, with finish_reason 'length'"
    return None


async def find_server(
    target: Target, *, model: str | None, chat: bool, text: bool, api_key: str | None, timeout_s: float
) -> Server:
    """Connect, ask for the model's name unless ``model`` is given, and try what the server takes, with a few short
    requests. Raises `BenchFailed` when there is no server, `ConfigError` for what it will not do."""
    pool = Pool(target)
    try:
        await pool.resolve()
        name = model or await _model_name(target, pool, api_key)
        dialect = Dialect(name, chat=chat, vocab=None if chat or text else VOCABULARIES[0])
        server = Server(target, dialect, pool, timeout_s, api_key)
        return await _measure_words(await _settle(server))
    except BaseException:
        pool.close()
        raise


async def _model_name(target: Target, pool: Pool, api_key: str | None) -> str:
    exchange = await pool.ask(request(target.head("GET", "/models", api_key)), _PROBE_TIMEOUT_S)
    if exchange.status in (401, 403):
        raise ConfigError(_key_wanted(target, exchange))
    try:
        names = [str(card["id"]) for card in msgspec.json.decode(bytes(exchange.plain))["data"]]
    except (msgspec.DecodeError, KeyError, TypeError):
        names = []
    if len(names) == 1:
        return names[0]
    if names:
        raise ConfigError(f"{target.url} serves {len(names)} models: say which by --model ({', '.join(names)[:300]})")
    why = exchange.fault or f"HTTP {exchange.status}"
    raise ConfigError(f"{target.url}/models does not tell the model's name ({why}): give it by --model")


async def _settle(server: Server) -> Server:
    """Leave out, one after the other, what the server refuses. A server that fails otherwise is taken as it is: its
    faults are for the measurement to count."""
    while True:
        exchange = await _probe(server)
        if exchange.status in (401, 403):
            raise ConfigError(_key_wanted(server.target, exchange))
        if exchange.status == 404:
            raise ConfigError(
                f"{server.target.url}{server.dialect.route} for {server.dialect.model!r:.100}: HTTP 404"
                f"{_plain_words(exchange.plain)}: is that the route (--chat for chat) and the model (--model)?"
            )
        if exchange.status not in _REFUSALS:
            break
        refusal = bytes(exchange.plain).decode(errors="replace")
        simpler = server.dialect.without(refusal)
        if simpler is None:
            raise ConfigError(
                f"{server.target.url}{server.dialect.route} refuses the plainest request: HTTP {exchange.status} "
                f"{refusal:.300}"
            )
        server = replace(server, dialect=simpler)
    return await _finest_count(server, exchange) if exchange.streams else server


async def _finest_count(server: Server, probe: Exchange) -> Server:
    """Where chunks do not tell the usage so far, or bring several tokens at once (a server may wait for text), asking
    for the token ids may give a chunk for each."""
    deliveries, counted_by = probe.answer.arrivals()
    tells_usage = counted_by == "usage of each chunk"
    if tells_usage and len(deliveries) == sum(count for _, count in deliveries):
        return server
    wanted = replace(server, dialect=replace(server.dialect, continuous_usage_stats=False, return_token_ids=True))
    exchange = await _probe(wanted)
    if exchange.streams:
        found, counted_by = exchange.answer.arrivals()
        if counted_by == "token ids" and (not tells_usage or len(found) > len(deliveries)):
            return wanted
    return replace(server, dialect=replace(server.dialect, continuous_usage_stats=tells_usage))


async def _measure_words(server: Server) -> Server:
    """The prompt tokens of one word, and of all that prompts are made of."""
    if server.dialect.vocab is not None:
        return server
    one, all_ = [
        (await server.pool.ask(server.encode(" ".join(words), 1), _PROBE_TIMEOUT_S)).answer.prompt_tokens
        for words in (WORDS[:1], WORDS)
    ]
    if one is None or all_ is None or all_ <= one:
        return server
    each = (all_ - one) / (len(WORDS) - 1)
    return replace(server, words=Words(one - each, each))


async def _probe(server: Server) -> Exchange:
    prompt = Prompts(server.dialect.vocab, Words(), f"probe {now_ns()}").make(Arrival(0.0, _PROBE_INPUT, PROBE_OUTPUT))
    exchange = await server.pool.ask(server.encode(prompt, PROBE_OUTPUT), min(server.timeout_s, _PROBE_TIMEOUT_S))
    if exchange.status == 0 and (exchange.fault or "").startswith(NO_CONNECTION):
        raise BenchFailed(f"{server.target.url}: {exchange.fault}")
    return exchange


def _key_wanted(target: Target, exchange: Exchange) -> str:
    return f"{target.url} lets nobody in without the right key (HTTP {exchange.status}): give it by --api-key"


def _plain_words(body: bytearray) -> str:
    """What a JSON body calls its error, with a colon before it; nothing for another body."""
    try:
        found: Any = msgspec.json.decode(bytes(body))
    except msgspec.DecodeError:
        return ""
    error = found.get("error", found.get("detail", found)) if isinstance(found, dict) else None
    if error is None:
        return ""
    return f": {error_words(error)}"
