"""One target under atheris, until its time is over or it finds something: ``worker NAME libFuzzer's options``.
A process of its own: libFuzzer ends it, and what it is to see is instrumented while it is imported."""

from __future__ import annotations

import sys

import atheris


def main() -> None:
    name, arguments = sys.argv[1], sys.argv[2:]
    with atheris.instrument_imports(include=["firsttoken"], enable_loader_override=False):
        from benchmarks.fuzz.targets import TARGETS
    target = TARGETS[name]
    atheris.Setup([sys.argv[0], *arguments], atheris.instrument_func(target.run))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
