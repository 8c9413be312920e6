"""How soon a server is whole again after its engine was killed: when the callers know, and when another engine answers.

    python benchmarks/engine_restart.py            # the default model
    python benchmarks/engine_restart.py --json [--output-json FILE]

Starts ``firsttoken serve``, and kills its engine (SIGKILL) in the middle of a stream, several times. ``error_s``: until
the stream ended with its error event. ``ready_s``: until `/health/ready` said 200 again, without the pause that comes
before each restart but the first. ``start_s`` is the whole start of the server, by its own account.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from firsttoken.cli.report import header
from firsttoken.core.engine_args import DEFAULT_MODEL
from firsttoken.frontend.restarts import RestartPolicy

KILLS = 3
GIVE_UP_S = 300.0


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
    return connection.getresponse()


def engine_of(server: int) -> int:
    """The pid of the server's engine. Each thread has the children that it started itself."""
    for thread in Path(f"/proc/{server}/task").glob("*/children"):
        for pid in thread.read_text().split():
            if b"firsttoken.engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    raise SystemExit("the server has no engine")


def kill(server: int, port: int) -> tuple[float, float]:
    """Seconds until the caller of a stream knew, and until another engine was ready."""
    body = {"prompt": [1, 2, 3], "max_tokens": 400, "ignore_eos": True, "stream": True}
    stream = ask(port, "/v1/completions", body)
    stream.readline()
    began = time.monotonic()
    os.kill(engine_of(server), signal.SIGKILL)
    if b'"engine_dead"' not in stream.read():
        raise SystemExit("the stream did not say that its engine is dead")
    told = time.monotonic() - began
    while ask(port, "/health/ready").status != 200:
        if time.monotonic() - began > GIVE_UP_S:
            raise SystemExit("no other engine was ready")
        time.sleep(0.02)
    return told, time.monotonic() - began


def measure(model: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "firsttoken.cli.main", "serve", model, "--port", "0", "--max-model-len", "512"]
    command += ["--flight-dir", "none", "--engine-restarts", str(KILLS)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    banner = ""
    try:
        while (found := re.search(r"ready after (\d+) ms", banner)) is None:
            line = server.stdout.readline()
            if not line:
                raise SystemExit("the server did not start")
            banner += line
        address = re.search(r"http://127\.0\.0\.1:(\d+)", banner)
        assert address is not None
        pauses = [0.0, *(RestartPolicy().pause_s * 2**number for number in range(KILLS - 1))]
        times = [kill(server.pid, int(address[1])) for _ in range(KILLS)]
    finally:
        server.terminate()
        server.wait(60)
    start = int(found[1]) / 1e3
    ready = [after - pause for (_, after), pause in zip(times, pauses, strict=True)]
    told = {"start_s": start, "error_s": [told for told, _ in times], "ready_s": ready}
    return told | {"ready_of_start": statistics.median(ready) / start}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write it to a file, too")
    options = parser.parse_args()
    found = measure(options.model)
    document = {**header(model=options.model), **found}
    if options.output_json:
        options.output_json.write_text(json.dumps(document, indent=1) + "\n")
    if options.json:
        print(json.dumps(document))
        return 0
    for name in ("error_s", "ready_s"):
        print(f"{name:8} " + "  ".join(f"{value:.2f}" for value in found[name]))
    print(f"start_s  {found['start_s']:.2f}: another engine took {found['ready_of_start']:.2f} of that")
    return 0


if __name__ == "__main__":
    sys.exit(main())
