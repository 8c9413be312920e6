"""What reading tool calls and reasoning out of an answer takes of the API process, in microseconds a token.

Texts are pushed in pieces of about a token (four characters), as they are when one caller is streamed to.

    python benchmarks/answer_readers.py --json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from statistics import median

from firsttoken.text.pieces import Reader
from firsttoken.text.reasoning import REASONING_FORMATS, ReasoningReader
from firsttoken.text.tools.formats import FORMATS
from firsttoken.text.tools.reader import Offer, ToolReader

PROSE = "The quick brown fox jumps over the lazy dog; then, in 2024, it went home to read a café's menu. "
ARGUMENTS = json.dumps({"path": "a/b.py", "lines": [PROSE] * 30, "replace": {"all": True, "most": 12}})
CALL = '{"name": "f", "arguments": ' + ARGUMENTS + "}"
TOKEN_CHARS = 4
SCHEMAS = {"f": {"type": "object"}}


def tools(name: str) -> Callable[[], Reader]:
    return lambda: ToolReader(FORMATS[name], Offer(SCHEMAS))


def thinking() -> Reader:
    return ReasoningReader(REASONING_FORMATS["qwen3"], tools("hermes")(), inside=True)


CASES: dict[str, tuple[Callable[[], Reader], str]] = {
    "content": (tools("hermes"), PROSE * 40),
    "hermes_arguments": (tools("hermes"), f"<tool_call>\n{CALL}\n</tool_call>"),
    "llama3_arguments": (tools("llama3"), CALL),
    "mistral_arguments": (tools("mistral"), f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}"),
    "reasoning": (thinking, PROSE * 40),
}


def cost_us(make: Callable[[], Reader], text: str) -> float:
    """Of one token, over one answer."""
    parts = [text[start : start + TOKEN_CHARS] for start in range(0, len(text), TOKEN_CHARS)]
    reader = make()
    began = time.process_time_ns()
    for part in parts:
        reader.push(part)
    reader.finish()
    return (time.process_time_ns() - began) / len(parts) / 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=25, help="answers a case (default: 25)")
    parser.add_argument("--target-us", type=float, default=10.0, help="exit 1 above it (default: 10)")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    options = parser.parse_args()
    found = {name: median(cost_us(*case) for _ in range(options.repeat)) for name, case in CASES.items()}
    if options.json:
        print(json.dumps({"command": "answer_readers", "us_per_token": found}))
    else:
        for name, value in found.items():
            print(f"{name:20} {value:.2f} us a token")
    return 1 if max(found.values()) > options.target_us else 0


if __name__ == "__main__":
    sys.exit(main())
