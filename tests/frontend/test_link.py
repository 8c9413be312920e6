"""The routing of the engine's messages."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from firsttoken.core.errors import CheckpointError, ConfigError, EngineDead
from firsttoken.core.request import EngineRequest
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.frontend import link as link_module
from firsttoken.frontend.link import LONGEST_HOLD_NS, EngineLink
from firsttoken.transport.channel import ChannelClosed
from firsttoken.transport.messages import (
    Abort,
    EngineInfo,
    EngineStats,
    Failed,
    Ready,
    Refused,
    RequestDelta,
    StepOutputs,
    Submit,
)

INFO = EngineInfo(
    model="m",
    max_model_len=64,
    vocab_size=100,
    max_num_seqs=2,
    kv_blocks=4,
    block_tokens=16,
    bytes_per_block=1024,
    device="cpu",
    dtype="float32",
    quantization="none",
    kv_dtype="float32",
)


class Client:
    """A client end and its handle in one, driven by hand."""

    def __init__(self):
        self.sent = []
        self.living = True
        self.open = True
        self.client = self
        self.pid = None

    def send(self, message):
        if not self.open:
            raise ChannelClosed
        self.sent.append(message)

    def listen(self, on_message, on_close):
        self.tell, self.hang_up = on_message, on_close

    def step(self, *deltas):
        self.tell(StepOutputs(list(deltas), EngineStats(steps=1)))

    def alive(self):
        return self.living

    def how_it_ended(self):
        return ""


class Sink:
    def __init__(self, log):
        self.log = log

    def deliver(self, delta, ns):
        self.log.append(delta.id)

    keep = deliver

    def wake(self):
        pass

    def refuse(self, refusal):
        self.log.append(("refused", refusal.id))

    def die(self, error):
        self.log.append(("dead", str(error)))


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def link(client):
    link = EngineLink(client)
    link.listen()
    return link


@pytest.fixture
async def loop_link(client):
    """The same on the test's event loop."""
    link = EngineLink(client)
    link.listen()
    return link


def request(number):
    return EngineRequest(id=number, prompt=b"\0" * 4, params=SamplingParams(), seed=0, max_tokens=4)


def test_first_tokens_go_before_next_tokens(client, link):
    log = []
    link.submit([request(1), request(2)], Sink(log))
    client.step(RequestDelta(1, [5]), RequestDelta(2, [5]))
    link.submit([request(3)], Sink(log))
    client.step(RequestDelta(1, [6]), RequestDelta(2, [6]), RequestDelta(3, [5]))
    client.step(RequestDelta(1, [7]), RequestDelta(3, [6]), RequestDelta(2, [7]))
    assert log == [1, 2, 3, 1, 2, 1, 3, 2]
    assert isinstance(client.sent[0], Submit)
    assert len(client.sent[0].requests) == 2, "answers of one request go in one message"


async def test_requests_of_one_turn_of_the_loop_leave_together(client, loop_link):
    log = []
    loop_link.submit([request(1)], Sink(log))
    loop_link.submit([request(2), request(3)], Sink(log))
    assert not client.sent
    await asyncio.sleep(0)
    assert [[each.id for each in message.requests] for message in client.sent] == [[1, 2, 3]]
    loop_link.submit([request(4)], Sink(log))
    loop_link.abort([4])
    await asyncio.sleep(0)
    assert [type(message) for message in client.sent[1:]] == [Submit, Abort], "what is ended must be known"


async def test_a_long_turn_sends_what_it_has(client, loop_link):
    loop_link.submit([request(1)], Sink([]))
    loop_link._held_since_ns -= 2 * LONGEST_HOLD_NS
    loop_link.submit([request(2)], Sink([]))
    loop_link.submit([request(3)], Sink([]))
    assert [[each.id for each in message.requests] for message in client.sent] == [[1, 2]]
    await asyncio.sleep(0)
    assert [[each.id for each in message.requests] for message in client.sent] == [[1, 2], [3]]


async def test_who_asked_in_the_turn_in_which_the_channel_closed_hears_of_it(client, loop_link):
    log = []
    loop_link.submit([request(1)], Sink(log))
    client.open = False
    await asyncio.sleep(0)
    assert [what for what, _ in log] == ["dead"]
    with pytest.raises(EngineDead):
        loop_link.submit([request(2)], Sink(log))


class Waker(Sink):
    """A sink whose owner runs in a later turn of the loop, as tasks do."""

    def deliver(self, delta, ns):
        self.log.append(("told", delta.id))
        asyncio.get_running_loop().call_soon(self.log.append, ("ran", delta.id))


async def test_who_waits_for_a_first_token_runs_before_others_are_told(client, loop_link):
    log = []
    loop_link.submit([request(1), request(2)], Waker(log))
    client.step(RequestDelta(1, [5]), RequestDelta(2, [5]))
    for _ in range(3):
        await asyncio.sleep(0)
    loop_link.submit([request(3)], Waker(log))
    log.clear()
    client.step(RequestDelta(1, [6]), RequestDelta(2, [6]), RequestDelta(3, [5]))
    for _ in range(4):
        await asyncio.sleep(0)
    assert log == [("told", 3), ("ran", 3), ("told", 1), ("ran", 1), ("told", 2), ("ran", 2)]


async def test_one_is_told_in_a_turn_and_others_run_between(client, loop_link):
    log = []
    loop_link.submit([request(number) for number in range(3)], Sink(log))
    for _ in range(2):  # first tokens and next ones alike
        log.clear()
        client.step(*(RequestDelta(number, [5]) for number in range(3)))
        for told in (1, 2, 3, 3):
            assert log == list(range(told))
            await asyncio.sleep(0)
    log.clear()
    for token in (6, 7):  # the second comes before the first has gone to all, and starts no second round of turns
        client.step(*(RequestDelta(number, [token]) for number in range(3)))
    for told in (3, 4, 5, 6):
        assert log == [0, 1, 2, 1, 2, 0][:told]
        await asyncio.sleep(0)


async def test_nothing_overtakes_what_waits_for_its_turn(client, loop_link):
    log = []
    everyone = list(range(4))
    loop_link.submit([request(number) for number in everyone], Sink(log))
    client.step(*(RequestDelta(number, [5]) for number in everyone))
    client.tell(Refused(0, "too long"))
    assert log == [*everyone, ("refused", 0)]
    log.clear()
    client.step(*(RequestDelta(number, [6]) for number in everyone[1:]))
    loop_link.abort([everyone[-1]])
    client.hang_up()
    assert log == [*everyone[1:-1], ("dead", "the engine stopped: its end of the channel was closed")]


class Keeper(Sink):
    """A sink that does its work where it is told, as streams do."""

    def keep(self, delta, ns):
        self.log.append(("kept", delta.id))

    def wake(self):
        self.log.append("woken")


async def test_who_was_not_served_before_the_next_step_goes_first_and_gets_both_together(client, loop_link):
    log = []
    everyone = range(4)
    loop_link.submit([request(number) for number in everyone], Keeper(log))
    client.step(*(RequestDelta(number, [5]) for number in everyone))
    for _ in range(5):
        await asyncio.sleep(0)
    log.clear()
    client.step(*(RequestDelta(number, [6], finish_reason="stop" if number == 3 else None) for number in everyone))
    await asyncio.sleep(0)
    client.step(*(RequestDelta(number, [7]) for number in range(3)))
    for _ in range(5):
        await asyncio.sleep(0)
    assert log == [0, 1, ("kept", 2), ("kept", 3), "woken", 2, 0, 1], "nothing follows for the last, so he is woken"
    log.clear()
    client.step(*(RequestDelta(number, [8]) for number in range(3)))
    client.tell(Refused(0, "no room"))
    assert log == [0, ("kept", 1), ("kept", 2), "woken", "woken", ("refused", 0)]


async def test_who_ended_is_told_in_a_later_turn_too(client, loop_link):
    idle = []
    loop_link.on_idle = lambda: idle.append(loop_link.live)
    everyone = range(2)
    loop_link.submit([request(number) for number in everyone], Sink([]))
    client.step(*(RequestDelta(number, [5], finish_reason="length") for number in everyone))
    assert (loop_link.live, idle) == (1, [])
    await asyncio.sleep(0)
    assert (loop_link.live, idle) == (0, [0])


def test_nothing_is_kept_of_what_has_ended(client, link):
    idle = []
    link.on_idle = lambda: idle.append(link.live)
    link.submit([request(number) for number in range(4)], Sink([]))
    client.step(RequestDelta(0, [1], finish_reason="length"))
    client.tell(Refused(1, "too long"))
    link.abort([2, 2, 0, 99])
    assert client.sent[1:] == [Abort([2])]
    client.step(RequestDelta(2, [], finish_reason="abort"))
    assert idle == []
    link.abort([3])
    assert idle == [0]
    assert not link._sinks
    assert not link._fresh


def test_every_sink_is_told_of_the_end_once(client, link):
    log = []
    link.submit([request(1), request(2)], Sink(log))
    client.tell(Failed("out of memory"))
    client.hang_up()
    assert log == [("dead", "the engine stopped: out of memory")]
    with pytest.raises(EngineDead, match="out of memory"):
        link.submit([request(3)], Sink(log))
    link.abort([1])
    assert len(client.sent) == 1


@pytest.mark.parametrize(("asked", "lines"), [(False, 1), (True, 0)])
def test_the_death_of_a_started_engine_is_logged_once(client, link, caplog, asked, lines):
    client.tell(Ready(INFO))
    if asked:
        link.fail("it was shut down", asked=True)
    client.hang_up()
    link.fail("again")
    assert [record.levelname for record in caplog.records] == ["ERROR"] * lines


def test_an_engine_that_never_started_logs_no_death(client, link, caplog):
    client.tell(Failed("no such device", kind="config"))
    client.hang_up()
    assert not caplog.records, "whoever waits for the start reports it"


@pytest.mark.parametrize("started", [True, False])
def test_the_flight_recorder_hears_of_the_death_of_a_started_engine(client, link, started):
    heard = []
    link.flight = SimpleNamespace(died=heard.append)
    if started:
        client.tell(Ready(INFO))
    client.tell(Failed("the device is gone"))
    client.hang_up()
    assert heard == ["the device is gone"] * started


def test_a_closed_channel_found_while_sending_is_a_death(client, link):
    log = []
    link.submit([request(1)], Sink(log))
    client.open = False
    with pytest.raises(EngineDead, match="closed"):
        link.submit([request(2)], Sink(log))
    assert log[0][0] == "dead"
    assert link.live == 0


def test_a_death_is_believed_at_the_second_look(client, link):
    client.living = False
    link.check()
    assert link.error is None, "its last words may be on their way"
    link.check()
    assert isinstance(link.error, EngineDead)
    with pytest.raises(EngineDead):
        link.ready.result(0)


@pytest.mark.parametrize(("kind", "error"), [("config", ConfigError), ("checkpoint", CheckpointError)])
def test_a_refusal_to_start_is_raised_as_what_it_was(client, link, kind, error):
    client.tell(Failed("threads must be at least 1, got 0", kind))
    with pytest.raises(error, match=r"^threads must be at least 1, got 0$"):
        link.ready.result(0)
    with pytest.raises(EngineDead, match="got 0"):
        link.submit([request(1)], Sink([]))


@pytest.mark.parametrize("message", [Ready(INFO), Failed("too late"), Failed("too late", "config")])
def test_news_of_the_start_may_come_after_the_wait_was_given_up(client, link, message):
    link.fail("it was shut down")
    client.tell(message)
    client.hang_up()
    assert str(link.error) == "the engine stopped: it was shut down"


def test_a_wait_that_is_given_up_leaves_the_start_as_it_is(client, link):
    async def give_up():
        waiting = asyncio.wrap_future(link.ready)
        waiting.cancel()
        await asyncio.sleep(0)

    asyncio.run(give_up())
    assert not link.ready.done()
    client.tell(Ready(INFO))
    assert link.ready.result(0) is INFO


def test_a_stuck_engine_is_waited_for_by_few_of_those_who_left(client, link, monkeypatch):
    monkeypatch.setattr(link_module, "MAX_PARTING", 2)
    told = []
    leaver = SimpleNamespace(part=lambda number, last: told.append((number, last)))
    for number in range(4):
        link.submit([request(number)], Sink([]))
        link.abort([number], leaver)
    assert told == [(0, None), (1, None)]
    last = [RequestDelta(number, [], finish_reason="abort") for number in range(4)]
    client.step(*last)
    assert told == [(0, None), (1, None), (2, last[2]), (3, last[3])]


def test_tokens_arrive_though_a_number_cannot_be_kept(client, link, caplog):
    def fail(stats):
        raise KeyError("a gauge")

    link.on_stats = fail
    log = []
    link.submit([request(1)], Sink(log))
    client.step(RequestDelta(1, [5]))
    assert log == [1]
    assert "could not be kept" in caplog.text
