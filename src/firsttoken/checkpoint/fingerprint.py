"""The identity of a checkpoint's content, cheap enough to compute at every start."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from firsttoken.core.errors import CheckpointError

WHOLE_BYTES = 1 << 20
SAMPLES = 64
SAMPLE_BYTES = 4096


def fingerprint_files(kind: str, files: Iterable[Path]) -> str:
    """SHA-256 (hex) over each file's size, modification time, first MiB (so its header) and 64 evenly strided samples.

    Neither names nor paths take part: an alias that is pointed at other weights gets another fingerprint, and the
    same file under two names gets one. At most 1.3 MiB of each file is read, whatever its size.
    """
    digest = hashlib.sha256(f"firsttoken/checkpoint/1/{kind}".encode())
    for path in files:
        try:
            _add_file(digest, path)
        except OSError as error:
            raise CheckpointError(f"cannot be read ({error.strerror or error})", file=str(path)) from error
    return digest.hexdigest()


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        stat = path.stat()
        digest.update(stat.st_size.to_bytes(8, "little"))
        digest.update(stat.st_mtime_ns.to_bytes(8, "little", signed=True))
        digest.update(file.read(WHOLE_BYTES))
        rest = stat.st_size - WHOLE_BYTES
        if rest <= 0:
            return
        for index in range(SAMPLES):
            # The last sample ends at the end of the file.
            file.seek(WHOLE_BYTES + max(0, rest - SAMPLE_BYTES) * index // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))


def fingerprint_text(kind: str, text: bytes) -> str:
    """SHA-256 (hex) of something that has no file."""
    return hashlib.sha256(f"firsttoken/checkpoint/1/{kind}/".encode() + text).hexdigest()
