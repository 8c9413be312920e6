"""Headless Chromium by chromedriver, whose interface is JSON over HTTP (W3C WebDriver)."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

# What the browser would ask its maker's servers for is off: the tests are about what the page asks for.
_ARGUMENTS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-precise-memory-info",
)
_CALL_S = 60.0


class BrowserError(Exception):
    """The browser could not be started, or refused a command."""


def missing() -> str | None:
    """What is not installed; None where a browser can be started."""
    for name in ("chromium", "chromedriver"):
        if shutil.which(name) is None:
            return f"{name} is not installed (on Debian: apt-get install chromium chromium-driver)"
    return None


class Browser:
    """One window. Blocks: not for an event loop's thread."""

    def __init__(self) -> None:
        why = missing()
        if why is not None:
            raise BrowserError(why)
        self._driver = subprocess.Popen(
            [str(shutil.which("chromedriver")), "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._session = ""
        try:
            self._port = self._read_port()
            self._session = self._begin()
        except BaseException:
            self.close()
            raise

    def _read_port(self) -> int:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            found = re.search(r"started successfully on port (\d+)", line)
            if found:
                return int(found[1])
        raise BrowserError("chromedriver ended before it was ready")

    def _begin(self) -> str:
        # Chromium's own sandbox needs a user who is not root.
        arguments = [*_ARGUMENTS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        options = {"binary": shutil.which("chromium"), "args": arguments}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        return str(self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"])

    def _call(self, method: str, path: str, body: object = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_CALL_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            told = json.loads(connection.getresponse().read())["value"]
        finally:
            connection.close()
        if isinstance(told, dict) and "error" in told:
            raise BrowserError(f"{told['error']}: {told['message'].splitlines()[0]}")
        return told

    def _do(self, command: str, body: object) -> Any:
        return self._call("POST", f"/session/{self._session}/{command}", body)

    def open(self, url: str) -> None:
        self._do("url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """What the script returns; it is a function's body, with ``arguments``."""
        return self._do("execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str, within_s: float = 10.0) -> Any:
        """What ``return SCRIPT`` says once that is true. Raises `BrowserError`."""
        end = time.monotonic() + within_s
        while not (told := self.run(f"return {script}")):
            if time.monotonic() > end:
                shown = self.run("return document.body.innerText")
                raise BrowserError(f"waited {within_s:g} s for {script}; the page says: {shown[:600]}")
            time.sleep(0.05)
        return told

    def cdp(self, command: str, **parameters: object) -> Any:
        """A command of the DevTools protocol."""
        return self._do("goog/cdp/execute", {"cmd": command, "params": parameters})

    def look(self, width: int, height: int, *, dark: bool = False, scale: float = 1.0, phone: bool = False) -> None:
        """The window's size in CSS pixels, and its scheme."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme])
        self.cdp(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )

    def press(self, key: str, code: int) -> None:
        """A key by its name and its Windows virtual key code."""
        for kind in ("keyDown", "keyUp"):
            self.cdp("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def heap_bytes(self) -> int:
        """Of the page's scripts, after a collection."""
        self.cdp("HeapProfiler.collectGarbage")
        return int(self.run("return performance.memory.usedJSHeapSize"))

    def complaints(self) -> list[str]:
        """What the console has been told since the last call, errors and violations of the policy among it."""
        return [entry["message"] for entry in self._do("se/log", {"type": "browser"})]

    def addresses(self) -> list[str]:
        """What was asked for over the network since the last call."""
        found = []
        for entry in self._do("se/log", {"type": "performance"}):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", f"/session/{self._session}/screenshot")))

    def close(self) -> None:
        if self._session:
            with contextlib.suppress(OSError, BrowserError, http.client.HTTPException):  # it may have gone already
                self._call("DELETE", f"/session/{self._session}")
            self._session = ""
        self._driver.terminate()
        try:
            self._driver.wait(10)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            self._driver.wait()
        if self._driver.stdout is not None:
            self._driver.stdout.close()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
