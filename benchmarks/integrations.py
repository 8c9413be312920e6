"""Other projects' clients against a running server, each in a virtual environment of its own, and, where they are
installed, Prometheus with the expressions of the Grafana dashboard and Chromium with the server's own page. And the
`compressed-tensors` package, with ``--compressed-tensors PYTHON``, over what ``firsttoken quantize`` writes, and
firsttoken over what that package does.

    make test-integrations

Starts ``firsttoken serve`` on a free port, runs a client script with each interpreter given, and writes one JSON object
with what each check saw. Exits with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from firsttoken.cli import report
from firsttoken.core.engine_args import DEFAULT_MODEL

ROOT = Path(__file__).resolve().parents[1]
CLIENTS = ("openai", "anthropic", "langchain", "litellm")
LAYOUT = Path(__file__).with_name("compressed_tensors_checks.py")
READING = Path(__file__).with_name("compressed_tensors_reading.py")
# The default model knows no tools: with this template it is asked to call some, and forced calls are made all the same.
TEMPLATE = Path(__file__).parent / "clients" / "chatml_tools.jinja"
NO_PACKAGE = "no interpreter with compressed-tensors was named"
SCHEMES = ("int4", "fp8", "int8")
START_S = 300.0  # a machine may have other work
# How long Prometheus scrapes a server that is asked things all the while.
GRAFANA_S = 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with code {server.returncode}: its last words are above")
        try:
            with urllib.request.urlopen(f"{url}/health/ready", timeout=5):  # noqa: S310  # our own address
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"the server was not ready within {START_S:.0f} s")


def run_client(name: str, python: str, url: str) -> dict[str, Any]:
    """What one environment's client saw: its version and each check's outcome."""
    command = [str(Path(python).absolute()), "-m", f"benchmarks.{name}_client_checks", url]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, cwd=ROOT)
    if done.returncode != 0:
        return {"python": python, "ok": False, "error": f"the client ended with code {done.returncode}"}
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"python": python, "ok": all(check["ok"] for check in seen["checks"]), **seen}


def run_grafana(model: str) -> dict[str, Any]:
    """What Prometheus made of the dashboard."""
    from benchmarks import grafana  # which takes from here

    if shutil.which("prometheus") is None:
        return {"ok": True, "skipped": "prometheus is not installed (Debian: prometheus)"}
    return grafana.run(model, GRAFANA_S)


def run_page() -> dict[str, Any]:
    """What Chromium saw of the live page."""
    from benchmarks import browser, dashboard_page

    why = browser.missing()
    if why is not None:
        return {"ok": True, "skipped": why}
    return dashboard_page.page_figures(free_port())


def run_layout(python: str | None, model: str) -> dict[str, Any]:
    """What the package makes of the model in each scheme. It is rounded to nearest: methods share the layout."""
    if python is None:
        return {"ok": True, "skipped": NO_PACKAGE}
    with tempfile.TemporaryDirectory() as folder:
        outs = {scheme: f"{folder}/{scheme}" for scheme in SCHEMES}
        for scheme, out in outs.items():
            command = [sys.executable, "-m", "firsttoken.cli.main", "quantize", model, "--scheme", scheme, "--out", out]
            command += ["--method", "rtn", "--tokens", "64", "--context", "32", "--device", "cpu", "--no-self-check"]
            subprocess.run(command, check=True, stdout=sys.stderr, timeout=600)
        return _run_checks([python, str(LAYOUT), *outs.values()])


def run_reading(python: str | None) -> dict[str, Any]:
    """Whether what the package writes is read as it is meant."""
    return {"ok": True, "skipped": NO_PACKAGE} if python is None else _run_checks([python, str(READING)])


def _run_checks(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600)
    if not done.stdout:
        return {"ok": False, "error": f"the checks ended with code {done.returncode}"}
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "client", nargs="+", metavar="NAME=PYTHON", help=f"a client ({', '.join(CLIENTS)}) and its environment's python"
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--compressed-tensors", metavar="PYTHON", help="an interpreter that has it and firsttoken")
    parser.add_argument("--output", type=Path, help="write the result here, too")
    options = parser.parse_args()
    pairs = [one.partition("=") for one in options.client]
    for name, _, python in pairs:
        if name not in CLIENTS or not python:
            parser.error(f"{name!r} is not one of {', '.join(CLIENTS)} with =PYTHON behind it")

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "firsttoken.cli.main", "serve", options.model, "--port", str(port)]
    command += ["--chat-template", str(TEMPLATE), "--kv-memory", "256MiB"]
    server = subprocess.Popen(command, stdout=sys.stderr)
    try:
        wait_until_ready(url, server)
        clients = [run_client(name, python, url) for name, _, python in pairs]
    finally:
        server.terminate()
        code = server.wait(60)
    result = {
        **report.header(model=options.model),
        "clients": clients,
        "server_exit_code": code,
        "grafana": run_grafana(options.model),
        "dashboard": run_page(),
        "layout": run_layout(options.compressed_tensors, options.model),
        "reading": run_reading(options.compressed_tensors),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n")
    others = (result[name] for name in ("grafana", "dashboard", "layout", "reading"))
    fine = code == 0 and all(one["ok"] for one in (*clients, *others))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
