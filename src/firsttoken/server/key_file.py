"""The file of ``--api-key-file``: a key a line, as ``--api-key`` takes them, so that none is on a command line.

::

    # for the dashboard
    dashboard=sk-1f0c...
    batch=sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08

With ``sha256:`` it is not the key that the file has, but what ``printf %s KEY | sha256sum`` says of it.
"""

from __future__ import annotations

import logging
import stat
from pathlib import Path

from firsttoken.core.errors import ConfigError

log = logging.getLogger(__name__)

_MOST_BYTES = 1 << 20


def read_keys(path: str) -> tuple[str, ...]:
    """The keys of a file, of which there is at least one. Warns of a file that every user of the machine can read.
    Raises `ConfigError`, which tells a line's number and nothing that stands in it."""
    try:
        file = Path(path)
        if file.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
            log.warning("--api-key-file %s can be read by every user of this machine: chmod o-rw it", path)
        with file.open("rb") as opened:
            raw = opened.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read --api-key-file {path}: {error.strerror}") from None
    if len(raw) > _MOST_BYTES:
        raise ConfigError(f"--api-key-file {path} has more than {_MOST_BYTES} bytes: give a key a line")
    keys = []
    for number, line in enumerate(raw.splitlines(), 1):
        text = line.strip()
        if not text or text.startswith(b"#"):
            continue
        if not text.isascii() or b" " in text or b"\t" in text:
            raise ConfigError(
                f"--api-key-file {path}, line {number}: expected KEY or NAME=KEY in ASCII, without blanks in it"
            )
        keys.append(text.decode("ascii"))
    if not keys:
        raise ConfigError(f"--api-key-file {path} has no key: write one a line, or leave the option out")
    return tuple(keys)
