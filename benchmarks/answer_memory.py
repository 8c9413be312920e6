"""The memory that one answer takes in the API process until it is told as a whole: long ones with log-probabilities.

    python benchmarks/answer_memory.py --json

An API process for each case serves the scripted engine, as `http_streaming` has it. After a short answer, so that what
is made for the first time is not counted, its peak is set back, and read again after the long one: what it rose above
the memory that the process had, in all and for each token.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.http_costs import MESSAGES, server
from firsttoken.cli.report import header

MIB = 1 << 20
TOP = 20


def cases(answers: int, tokens: int) -> dict[str, tuple[str, dict[str, Any], int]]:
    """Path, body and number of tokens that are told of."""
    many = {"n": answers, "max_tokens": tokens}
    chat = {"messages": MESSAGES, **many}
    response = {"input": MESSAGES, "max_output_tokens": tokens, "top_logprobs": TOP}
    response["include"] = ["message.output_text.logprobs"]
    prompt = {"prompt": [7] * tokens, "max_tokens": 0}
    return {
        "chat": ("/v1/chat/completions", chat, answers * tokens),
        "chat, logprobs": ("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": TOP}, answers * tokens),
        "completion, logprobs": ("/v1/completions", {"prompt": [7], **many, "logprobs": TOP}, answers * tokens),
        "response, logprobs": ("/v1/responses", {**response, "store": False}, tokens),
        "response, logprobs, kept": ("/v1/responses", response, tokens),
        "prompt_logprobs": ("/v1/completions", {**prompt, "prompt_logprobs": TOP}, tokens),
        "echo, logprobs": ("/v1/completions", {**prompt, "echo": True, "logprobs": TOP}, tokens),
    }


def status(pid: int, name: str) -> int:
    """Bytes, from the kernel's account of a process."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def ask(port: int, path: str, body: dict[str, Any]) -> int:
    """Bytes of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", path, json.dumps({"temperature": 0, **body}))
    reply = connection.getresponse()
    size = 0
    while piece := reply.read(1 << 16):
        size += len(piece)
    connection.close()
    if reply.status != 200:
        raise RuntimeError(f"{path} was answered with {reply.status}")
    return size


def measure(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for name, (path, body, tokens) in cases(options.answers, options.tokens).items():
        with server(options.step_ms) as (port, pid):
            ask(port, path, {**body, **{key: 16 for key in ("max_tokens", "max_output_tokens") if body.get(key)}})
            before = status(pid, "VmRSS")
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
            size = ask(port, path, body)
            rose = status(pid, "VmHWM") - before
        found[name] = {"tokens": tokens, "answer_mib": size / MIB, "peak_mib": rose / MIB}
        found[name]["bytes_per_token"] = rose / tokens
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--answers", type=int, default=8, help="of a chat or completion (default: 8)")
    parser.add_argument("--tokens", type=int, default=3500, help="of an answer, or of a prompt (default: 3500)")
    parser.add_argument("--step-ms", type=float, default=0.1, help="time of the scripted engine's step")
    options = parser.parse_args()
    found = measure(options)
    if options.json:
        print(json.dumps({**header(device_name="cpu"), "cases": found}))
        return 0
    for name, one in found.items():
        told, peak = one["answer_mib"], one["peak_mib"]
        print(
            f"{name:26}{one['tokens']:>7} tokens{told:8.1f} MiB told{peak:8.1f} MiB{one['bytes_per_token']:8.0f} B each"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
