"""``firsttoken COMMAND``: the parser, and how errors become exit codes.

Exit codes: 0 on success, 1 where the work or a stated target failed, 2 on bad usage, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol

from firsttoken.cli import (
    bench,
    chat,
    config,
    diagnose,
    evaluate,
    frontier,
    generate,
    plan,
    pull,
    quantize,
    replay,
    serve,
    simulate,
    top,
    version,
    warm,
)
from firsttoken.cli.options import HelpFormatter, set_up_logging
from firsttoken.core.errors import ConfigError, FirstTokenError, InvalidRequest
from firsttoken.core.meant import meant
from firsttoken.core.vllm_options import vllm_hint
from firsttoken.observability.logging import logging_setup
from firsttoken.version import __version__

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 128 + signal.SIGINT

DESCRIPTION = "An LLM inference engine and OpenAI-compatible server whose one promise is latency."
EPILOG = """\
examples:
  firsttoken serve                          the default model on 127.0.0.1:8000
  firsttoken chat                           talk to it in this terminal
  firsttoken generate --prompt "Hello"      one answer
  firsttoken COMMAND --help                 all options of a command

MODEL is an alias (smollm2), a .gguf file, a folder in Hugging Face layout, a hub repository id,
or random:SHAPE (random weights, for tests and benchmarks).
"""


class Command(Protocol):
    """What a command's module offers."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int: ...


COMMANDS: tuple[Command, ...] = (
    serve,
    chat,
    generate,
    bench,
    diagnose,
    evaluate,
    top,
    simulate,
    replay,
    frontier,
    plan,
    pull,
    quantize,
    warm,
    config,
    version,
)


_NO_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """Says what is wrong and where help is, not the whole usage."""

    def unknown(self, words: Sequence[str]) -> NoReturn:
        """Refuse words that no option takes."""
        flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        typed = next((word.partition("=")[0] for word in words if word.startswith("-")), "")
        self.error("unrecognized arguments: " + " ".join(words) + (vllm_hint(typed) or meant(typed, flags)))

    def flags(self) -> dict[str, str]:
        """Of options whose names have several words, by what they are called in Python."""
        flags = (flag for action in self._actions for flag in action.option_strings if flag.startswith("--"))
        return {flag[2:].replace("-", "_"): flag for flag in flags if "-" in flag[2:]}

    def error(self, message: str) -> NoReturn:
        if found := _NO_CHOICE.search(message):
            message += meant(found[1], [word.strip("' ") for word in found[2].split(",")])
        names = [str(action.metavar) for action in self._actions if not action.option_strings]
        words = [f"[{name}]" if name == "MODEL" else name for name in names]
        print(
            f"usage: {' '.join([self.prog, *words, '[options]'])}; all options: {self.prog} --help",
            f"{self.prog}: error: {message}",
            sep="\n",
            file=sys.stderr,
        )
        sys.exit(USAGE)


def build_parser() -> argparse.ArgumentParser:
    """The whole parser. Building it imports no engine: `firsttoken --help` takes milliseconds."""
    parser = Parser(prog="firsttoken", description=DESCRIPTION, epilog=EPILOG, formatter_class=HelpFormatter)
    parser.add_argument("--version", action="version", version=f"firsttoken {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(
            command.NAME,
            help=command.HELP,
            description=command.HELP[0].upper() + command.HELP[1:] + ".",
            epilog=getattr(command, "EPILOG", None),
            formatter_class=HelpFormatter,
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run, parser=sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Usage errors that argparse finds raise ``SystemExit(2)``."""
    options, unknown = build_parser().parse_known_args(argv)
    if unknown:
        options.parser.unknown(unknown)
    set_up_logging(options, "warning")
    try:
        return int(options.run(options))
    except (ConfigError, InvalidRequest) as error:
        return _report(options.command, _with_flags(str(error), options.parser), USAGE)
    except FirstTokenError as error:
        return _report(options.command, _with_flags(str(error), options.parser), FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader left (`firsttoken generate ... | head`). Python flushes stdout once more at exit: let it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        # A full disk, a file that may not be read: the system's own words say it, a traceback adds nothing.
        where = f"{error.filename}: " if error.filename is not None else ""
        return _report(options.command, f"{where}{error.strerror or error}", FAILED)


def _with_flags(text: str, parser: Parser) -> str:
    """Errors name options as in Python: who is at the command line knows them as flags."""
    flags = parser.flags()
    return re.sub(r"(?<![\w./-])[a-z]+(?:_[a-z0-9]+)+(?![\w./])", lambda name: flags.get(name[0], name[0]), text)


def _report(command: str, error: Exception | str, code: int) -> int:
    _, as_json = logging_setup()
    if as_json:
        logging.getLogger("firsttoken").error("%s: %s", command, error)
    else:
        print(f"firsttoken {command}: error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
