"""Logging of the commands: one line an event on stderr, for people or (JSON lines) for machines."""

from __future__ import annotations

import logging
import sys
import threading
import unicodedata
from datetime import UTC, datetime
from types import TracebackType
from typing import IO, Any

import msgspec

MAX_ID = 128

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def clean_id(text: str, limit: int = MAX_ID) -> str:
    """A caller's request id made safe to log and to echo: control, format and surrogate characters are dropped, line
    and paragraph separators too, and the rest is cut to ``limit`` characters."""
    # Cut first: an id may be a megabyte of nonsense.
    return "".join(char for char in text[: 4 * limit] if _harmless(char))[:limit]


def _harmless(char: str) -> bool:
    return unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _one_line(text: str) -> str:
    """Escapes what could forge another log line or move the terminal's cursor."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    fields = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    if isinstance(fields.get("request_id"), str):
        fields["request_id"] = clean_id(fields["request_id"])
    return fields


class HumanFormatter(logging.Formatter):
    """``14:03:27.512 INFO  engine: message  key=value``, local time; a traceback follows on its own lines."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created)
        name = record.name.removeprefix("firsttoken.")
        line = (
            f"{moment:%H:%M:%S}.{int(record.msecs):03d} {record.levelname:<5} {name}: {_one_line(record.getMessage())}"
        )
        extras = _extras(record)
        if extras:
            line += "  " + " ".join(f"{key}={_one_line(str(value))}" for key, value in extras.items())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JSONFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (UTC, ISO 8601), ``level``, ``logger``, ``message``, the record's extra fields,
    ``exception`` when there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in _extras(record).items() if name not in entry}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(_sayable(entry), enc_hook=str).decode("utf-8")


def _sayable(value: Any) -> Any:
    """Lone surrogates cannot be encoded: replaced, so that a log call never raises."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {str(_sayable(key)): _sayable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_sayable(item) for item in value]
    return value


def setup_logging(level: str = "info", *, json_lines: bool = False, stream: IO[str] | None = None) -> logging.Handler:
    """Send firsttoken's records from ``level`` up, and other libraries' warnings, to ``stream`` (default: stderr).

    So that all of it is lines of one form, Python's warnings are records, too, and with ``json_lines`` what nobody
    caught, in any thread. Calling it again replaces what it set up before. Returns the handler. Raises ValueError for
    an unknown level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"unknown log level {level!r}: use debug, info, warning or error")
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JSONFormatter() if json_lines else HumanFormatter())
    handler.set_name("firsttoken")
    root = logging.getLogger()
    for old in [old for old in root.handlers if old.get_name() == "firsttoken"]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(max(number, logging.WARNING))
    logging.getLogger("firsttoken").setLevel(number)
    logging.captureWarnings(True)
    if json_lines:
        sys.excepthook, threading.excepthook = _uncaught, _uncaught_in_thread
    elif sys.excepthook is _uncaught:
        sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
    return handler


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        logging.getLogger("firsttoken").critical("nobody caught this error", exc_info=(kind, error, trace))


def _uncaught_in_thread(told: threading.ExceptHookArgs) -> None:
    if told.exc_value is not None and not issubclass(told.exc_type, SystemExit):
        name = "a thread" if told.thread is None else f"thread {told.thread.name}"
        info = (told.exc_type, told.exc_value, told.exc_traceback)
        logging.getLogger("firsttoken").error("%s ended with an error", name, exc_info=info)


def logging_setup() -> tuple[str, bool]:
    """The level that firsttoken logs at in this process, and whether as JSON lines: what a child process should do
    too."""
    level = logging.getLogger("firsttoken").getEffectiveLevel()
    ours = [handler for handler in logging.getLogger().handlers if handler.get_name() == "firsttoken"]
    return logging.getLevelName(level).lower(), any(isinstance(each.formatter, JSONFormatter) for each in ours)
