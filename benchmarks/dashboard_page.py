"""The dashboard in headless Chromium on a busy scripted server: how soon it paints, and whether it grows.

    python -m benchmarks.dashboard_page --seconds 60 --screenshots /tmp/shots

Needs chromium and chromedriver. Exits with 1 where a figure misses what is stated in `LIMITS`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.browser import Browser
from firsttoken.cli import report
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import CLASS_NAMES
from firsttoken.engine.stub import StubProcess
from firsttoken.frontend.async_llm import AsyncLLM
from firsttoken.server.config import ServerConfig
from firsttoken.server.run import run_server

MIB = 1 << 20
CALLERS = 24
# What page and server keep of the last minute's steps and requests fills up first: that is no growth.
FILL_S = 70.0
LOOKS = 5
LIMITS = {"first_paint_ms": 1000.0, "heap_growth_mib": 1.0, "rss_growth_mib": 16.0}
READY_S = 30.0
SIZES: dict[str, dict[str, Any]] = {
    "light": {"width": 1280, "height": 900},
    "dark": {"width": 1280, "height": 900, "dark": True},
    "phone": {"width": 390, "height": 844, "scale": 2.0, "phone": True},
}


def serve(port: int) -> int:
    """A server whose engine says what it was asked, eight milliseconds a step, to callers who ask all the time."""
    calls: set[asyncio.Task[None]] = set()

    async def launch() -> AsyncLLM:
        engine = StubProcess(
            "firsttoken.engine.stub:echo", step_s=0.008, max_num_seqs=32, kv_blocks=8192, cached_tokens=300
        )
        llm = AsyncLLM(engine, model_name="scripted")
        await llm.start()
        calls.update(asyncio.create_task(_caller(llm, random.Random(seed))) for seed in range(CALLERS))
        return llm

    return run_server(ServerConfig(port=port), launch)


async def _caller(llm: AsyncLLM, choice: random.Random) -> None:
    while not llm.is_draining:
        prompt = [choice.randrange(1000)] * choice.choice((20, 200, 700, 2000))
        params = SamplingParams(max_tokens=choice.choice((8, 40, 120)))
        async for _ in llm.generate({"prompt_token_ids": prompt}, params, service_class=choice.choice(CLASS_NAMES)):
            pass
        await asyncio.sleep(choice.random() * 0.3)


def measure(url: str, pid: int, seconds: float, screenshots: Path | None = None) -> dict[str, Any]:
    """Paint of the page that the server of process ``pid`` has at ``url``, and growth in ``seconds`` after `FILL_S`."""
    with Browser() as browser:
        browser.look(width=1280, height=900)
        browser.open(f"{url}/dashboard?hz=10")
        browser.until("document.querySelectorAll('.chart canvas').length === 4")
        paint = browser.run("return performance.getEntriesByName('first-contentful-paint')[0].startTime")
        ready = browser.run("return performance.timing.domContentLoadedEventEnd - performance.timing.navigationStart")
        opened_mib = _heap_mib(browser)
        time.sleep(FILL_S)
        heaps, sizes = [], []
        began = time.monotonic()
        for look in range(LOOKS):
            at = seconds * look / (LOOKS - 1)
            time.sleep(max(began + at - time.monotonic(), 0))
            heaps.append({"s": round(at, 1), "heap_mib": _heap_mib(browser)})
            sizes.append(_rss(pid) / MIB)
        elsewhere = sorted({one for one in browser.addresses() if not one.startswith(f"{url}/") and one != "data:,"})
        if screenshots is not None:
            _shoot(browser, screenshots)
        return {
            "first_paint_ms": round(paint, 1),
            "content_loaded_ms": ready,
            "seconds": seconds,
            "heap_opened_mib": opened_mib,
            "heap": heaps,
            "heap_growth_mib": round(heaps[-1]["heap_mib"] - heaps[0]["heap_mib"], 3),
            "rss_mib": [round(size, 1) for size in sizes],
            "rss_growth_mib": round(sizes[-1] - sizes[0], 1),
            "asked_elsewhere": elsewhere,
            "console": browser.complaints(),
        }


def _heap_mib(browser: Browser) -> float:
    """The least of some looks: a frame that is being read is no growth."""
    found = []
    for _ in range(5):
        found.append(browser.heap_bytes() / MIB)
        time.sleep(0.07)
    return round(min(found), 3)


def _shoot(browser: Browser, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        browser.look(**size)
        time.sleep(1.0)
        browser.look(**{**size, "height": browser.run("return document.documentElement.scrollHeight")})
        time.sleep(1.0)
        browser.screenshot(folder / f"{name}.png")


def _rss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"process {pid} has no VmRSS")


def _wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health/ready", timeout=5):  # noqa: S310  # our own address
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"the scripted server was not ready within {READY_S:g} s")


def page_figures(port: int, seconds: float = 60.0, screenshots: Path | None = None) -> dict[str, Any]:
    """Start the scripted server on ``port``, and measure its page; ``ok`` says whether all limits hold."""
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "benchmarks.dashboard_page", "--serve", str(port)]
    server = subprocess.Popen(command, stdout=sys.stderr, cwd=Path(__file__).parents[1])
    try:
        _wait_until_ready(url, server)
        figures = measure(url, server.pid, seconds, screenshots)
    finally:
        server.terminate()
        server.wait(60)
    missed = [name for name, limit in LIMITS.items() if figures[name] > limit]
    ok = not (missed or figures["asked_elsewhere"] or figures["console"])
    return {**figures, "limits": LIMITS, "missed": missed, "ok": ok}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--seconds", type=float, default=60.0, help="of live data at 10 Hz (default: 60)")
    parser.add_argument("--screenshots", type=Path, metavar="FOLDER")
    parser.add_argument("--serve", type=int, metavar="PORT", help="only be the busy server")
    options = parser.parse_args()
    if options.serve is not None:
        return serve(options.serve)
    figures = page_figures(options.port, options.seconds, options.screenshots)
    print(json.dumps({**report.header(), **figures}, indent=1))
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
