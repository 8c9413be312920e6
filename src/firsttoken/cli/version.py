"""``firsttoken version``: versions of the program and of what it stands on."""

from __future__ import annotations

import argparse
import json

NAME = "version"
HELP = "print the version, and those of the libraries in use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(options: argparse.Namespace) -> int:
    from firsttoken.cli import report

    if options.json:
        print(json.dumps(report.header()))
        return 0
    for name, value in report.versions().items():
        print(f"{name:<12} {value}")
    print(f"{'commit':<12} {report.commit() or 'not in a source tree'}")
    return 0
