"""The page in a real browser: what a reader sees of a live, an empty, a closed, a dead and a lost server."""

from __future__ import annotations

import asyncio
import socket

import pytest
from benchmarks.browser import Browser, missing

from firsttoken.server.config import ServerConfig
from firsttoken.server.run import _Uvicorn, _uvicorn_config
from tests.server.conftest import forever

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

TEXT = "document.getElementById('{}').textContent"
LIVE = "document.getElementById('state').dataset.state in {idle: 1, busy: 1}"


@pytest.fixture(scope="module")
def window():
    with Browser() as browser:
        yield browser


class Page:
    """The browser's blocking calls, from the event loop that serves the page."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    def __getattr__(self, name):
        method = getattr(self._browser, name)
        return lambda *words, **options: asyncio.to_thread(method, *words, **options)

    async def text(self, id_: str) -> str:
        return await self.run(f"return {TEXT.format(id_)}")


@pytest.fixture
async def page(window):
    made = Page(window)
    await made.look(1280, 900)
    await made.complaints()
    await made.addresses()
    yield made
    await made.open("about:blank")


async def load(client, count=6, **fields):
    tiers = ("p0", "p1", "p2")
    calls = [client.complete("x" * 40, max_tokens=30, service_tier=tiers[at % 3], **fields) for at in range(count)]
    return await asyncio.gather(*calls)


async def test_a_live_server(make_client, serve_http, page):
    async with make_client(forever, step_s=0.004, cached_tokens=16) as client, serve_http(client.app) as url:
        await page.open(f"{url}/dashboard")
        await page.until(LIVE)
        replies = await load(client)
        await page.until("document.querySelectorAll('#requests tbody tr').length === 6")
        await page.until("document.querySelectorAll('.chart canvas').length >= 3")
        table = await page.until("document.getElementById('latency').tBodies[0].rows[0].cells[1].textContent !== '–' "
                                 "&& document.getElementById('latency').innerText")  # fmt: skip
        assert "p0" in table
        assert "stub" in await page.text("engine")
        await page.until("document.getElementById('kv').innerText.includes('40 % of 240 tokens')")
        assert await page.run("return document.getElementById('heat-empty').hidden")
        assert "device 40 %" in await page.run("return document.getElementById('heat').getAttribute('aria-label')")

        # Arrow keys choose a step and a cell.
        await page.run("document.getElementById('strip').focus()")
        await page.press("ArrowLeft", 37)
        await page.until("/^(step \\d+|\\d+ steps)/.test(document.getElementById('strip-detail').textContent)")
        await page.run("document.getElementById('heat').focus()")
        await page.press("ArrowRight", 39)
        assert "40 % found, 96 of 240 tokens" in await page.text("heat-detail")

        # A request's waterfall.
        id_ = replies[0].headers["x-request-id"]
        await page.run(
            "[...document.querySelectorAll('#requests button')].find((one) => one.dataset.id === arguments[0]).click()",
            id_,
        )
        shown = await page.until(
            "document.querySelector('#waterfall .fall') && document.getElementById('waterfall').innerText"
        )
        for words in (id_, "prefill", "decode", "30 tokens", "Largest gap between tokens", "without an owner"):
            assert words in shown
        await page.press("Escape", 27)
        await page.until("!document.getElementById('waterfall').open")

        assert {one for one in await page.addresses() if not one.startswith(f"{url}/")} <= {"about:blank", "data:,"}
        assert await page.complaints() == []


async def test_nothing_yet(client, serve_http, page):
    async with serve_http(client.app) as url:
        await page.open(f"{url}/dashboard")
        await page.until(LIVE)
        shown = await page.run("return document.body.innerText")
        for words in (
            "No first token in the last minute.",
            "No step yet.",
            "No prompt yet.",
            "No request has ended yet.",
        ):
            assert words in shown, words
        assert await page.complaints() == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 390, 768, 1920])
async def test_nothing_is_wider_than_the_screen(make_client, serve_http, page, width, dark):
    async with make_client(forever, step_s=0.002) as client, serve_http(client.app) as url:
        await page.look(width, 844, dark=dark, phone=width < 500)
        await load(client)
        await page.open(f"{url}/dashboard")
        await page.until("document.querySelectorAll('#requests tbody tr').length === 6")
        assert await page.run("return document.documentElement.scrollWidth") == width


async def test_a_dead_engine(make_client, serve_http, page):
    async with make_client(forever) as client, serve_http(client.app) as url:
        await page.open(f"{url}/dashboard")
        await page.until(LIVE)
        client.engine.kill("the device fell off the bus")
        await page.until("document.getElementById('state').dataset.state === 'dead'")
        banner = await page.text("banner-text")
        assert banner.startswith("The engine is dead: ")
        assert "the device fell off the bus" in banner


async def test_a_lost_connection_comes_back(make_client, page):
    async with make_client(forever, step_s=0.002) as client:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        address = listener.getsockname()
        url = f"http://127.0.0.1:{address[1]}"

        async def serving(sock):
            server = _Uvicorn(_uvicorn_config(client.app))
            task = asyncio.create_task(server.serve(sockets=[sock]))
            while not server.started:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            return server, task

        server, task = await serving(listener)
        await page.open(f"{url}/dashboard")
        await page.until(LIVE)
        for one in list(client.app.dashboard._feed._listeners):
            one.close()
        server.should_exit = True
        await task
        await page.until("document.getElementById('state').dataset.state === 'lost'")
        assert "The connection is lost" in await page.text("banner-text")
        assert await page.run("return document.body.classList.contains('stale')")

        again = socket.socket()
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(address)
        server, task = await serving(again)
        await page.until(f"{LIVE} && document.getElementById('banner').hidden", within_s=20)
        await page.open("about:blank")
        server.should_exit = True
        await task


async def test_a_key_is_asked_for_and_stays_in_the_tab(make_client, serve_http, page):
    enter = (
        "document.getElementById('key-input').value = arguments[0]; document.querySelector('#key-form button').click()"
    )
    async with make_client(config=ServerConfig(api_keys=("secret",))) as client, serve_http(client.app) as url:
        await page.open(f"{url}/dashboard")
        await page.until("document.getElementById('key').open")
        assert "asks for a key" in await page.text("key-why")
        await page.run(enter, "wrong")
        await page.until("document.getElementById('key-why').textContent.includes('does not know')")
        assert await page.run("return document.getElementById('key').open")
        assert "Try another" in await page.text("key-why")
        await page.run(enter, "secret")
        await page.until(LIVE)
        assert not await page.run("return document.getElementById('key').open")
        assert await page.run("return [sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        assert not any("secret" in one for one in await page.addresses())
        await page.open(f"{url}/dashboard")  # in the same tab it is known
        await page.until(LIVE)
