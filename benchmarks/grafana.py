"""The expressions of a Grafana dashboard and of alerts as Prometheus takes them, and what a running one makes of each.

    python -m benchmarks.grafana

Starts a server with all three KV tiers and asks it things, starts ``prometheus`` (Debian's package of that name) on a
free port, which scrapes it, and evaluates every expression of ``deploy/grafana/firsttoken.json``. Then it kills the
server's engine, and waits until the alert of that fires. Exits with 1 if an expression is an error or gives nothing, if
that alert does not come, and if another does. ``make test-integrations`` does the same.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine_restart import engine_of
from benchmarks.integrations import free_port, wait_until_ready
from firsttoken.core.engine_args import DEFAULT_MODEL

DEPLOY = Path(__file__).parents[1] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "firsttoken.json"
ALERTS = DEPLOY / "prometheus-alerts.yml"
# Of those, the one that fires once an engine has died.
DIED = "FirsttokenEngineDied"
# What Grafana puts in for its variables, when everything is chosen.
VARIABLES = {"$instance": ".*", "$class": ".*", "$__rate_interval": "10s"}
TIERS = ("device", "host", "disk")
SCRAPE_S = 1
START_S = 120.0
# Until a scrape has seen the death and the rule has been looked at: some seconds.
ALERT_S = 60.0


@dataclass(frozen=True)
class Expression:
    panel: str
    text: str
    legend: str


def expressions(dashboard: dict[str, Any]) -> Iterator[Expression]:
    """All of them, with the variables put in; a panel that is repeated by tier once for each."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            for tier in TIERS if panel.get("repeat") == "tier" else TIERS[:1]:
                text, title = target["expr"].replace("$tier", tier), panel["title"].replace("$tier", tier)
                for name, value in VARIABLES.items():
                    text = text.replace(name, value)
                yield Expression(title, text, target["legendFormat"])


def read_dashboard(path: Path = DASHBOARD) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return read


class Prometheus:
    """A Prometheus of one's own that scrapes ``target`` (host:port); a context manager."""

    def __init__(self, target: str, program: str = "prometheus") -> None:
        found = shutil.which(program)
        if found is None:
            raise SystemExit("prometheus is not installed: apt-get install --no-install-recommends prometheus")
        self._program = found
        self._target = target
        self._folder = tempfile.TemporaryDirectory(prefix="firsttoken-prometheus-")
        self.url = f"http://127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Prometheus:
        folder = Path(self._folder.name)
        config = {
            "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [{"job_name": "firsttoken", "static_configs": [{"targets": [self._target]}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self.process = subprocess.Popen(
            [
                self._program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
                "--log.level=error",
            ],
            stdout=sys.stderr,
        )
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1):  # noqa: S310  # our own address
                    return self
            except OSError:
                time.sleep(0.1)
        self.__exit__()
        raise SystemExit(f"prometheus was not ready within {START_S:g} s")

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(30)
        self._folder.cleanup()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples that it has now. Raises `ValueError` for what Prometheus refuses."""
        asked = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query?{asked}", timeout=10) as reply:  # noqa: S310
                told = json.load(reply)
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]) from None
        found: list[dict[str, Any]] = told["data"]["result"]
        return found


def check(prometheus: Prometheus, dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Of every expression its samples' number, and ``ok`` where there is any."""
    checks = []
    for one in expressions(dashboard):
        try:
            found: int | str = len(prometheus.query(one.text))
        except ValueError as error:
            found = str(error)
        ok = isinstance(found, int) and found > 0
        checks.append({"panel": one.panel, "expression": one.text, "samples": found, "ok": ok})
    return checks


def firing(prometheus: Prometheus) -> list[str]:
    """The names of the alerts that fire."""
    return sorted({one["metric"]["alertname"] for one in prometheus.query('ALERTS{alertstate="firing"}')})


def run(model: str, seconds: float) -> dict[str, Any]:
    """A server under load, scraped for so long: what came of each expression."""
    with (
        tempfile.TemporaryDirectory(prefix="firsttoken-grafana-") as folder,
        _server(model, Path(folder)) as (url, server),
    ):
        with Prometheus(urllib.parse.urlsplit(url).netloc) as prometheus:
            end = time.monotonic() + seconds
            number = 0
            while time.monotonic() < end:
                _ask(url, number)
                number += 1
            checks = check(prometheus, read_dashboard())
            up = prometheus.query("up == 1")
            before = firing(prometheus)
            os.kill(engine_of(server), signal.SIGKILL)
            end = time.monotonic() + ALERT_S
            while time.monotonic() < end and DIED not in firing(prometheus):
                time.sleep(SCRAPE_S)
            after = firing(prometheus)
        return {
            "ok": bool(up) and all(one["ok"] for one in checks) and (before, after) == ([], [DIED]),
            "prometheus": _version(),
            "requests": number,
            "expressions": len(checks),
            "empty_or_refused": [one for one in checks if not one["ok"]],
            "alerts": {"before": before, "after_a_kill": after},
        }


@contextmanager
def _server(model: str, folder: Path) -> Iterator[tuple[str, int]]:
    """Its address and its process id."""
    targets = folder / "targets.toml"
    targets.write_text('[class.p1]\nttft_p99 = "10s"\n')
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "firsttoken.cli.main", "serve", model, "--port", str(port)]
    tiers = ["--kv-memory", "256MiB", "--kv-host-memory", "64MiB", "--kv-disk", str(folder), "--kv-disk-size", "256MiB"]
    server = subprocess.Popen([*command, *tiers, "--targets", str(targets)], stdout=sys.stderr)
    try:
        wait_until_ready(url, server)
        yield url, server.pid
    finally:
        server.terminate()
        server.wait(60)


def _ask(url: str, number: int) -> None:
    body = {
        "prompt": [1 + number % 7 + i % 200 for i in range(96)],
        "max_tokens": 12,
        "service_tier": f"p{number % 3}",
    }
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())  # noqa: S310
    with urllib.request.urlopen(asked, timeout=60) as reply:  # noqa: S310
        reply.read()


def _version() -> str:
    """Of the program, as "2.42.0"."""
    told = subprocess.run(["prometheus", "--version"], capture_output=True, text=True, timeout=10)  # noqa: S607
    return (told.stdout or told.stderr).split()[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--seconds", type=float, default=20, help="how long it is asked and scraped (default: 20)")
    options = parser.parse_args()
    result = run(options.model, options.seconds)
    print(json.dumps(result, indent=1))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
