"""The folder of the disk tier: made, checked and locked at the start, where errors still reach the user."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from firsttoken.core.errors import ConfigError
from firsttoken.kvcache.disk.files import supports_direct

SUBFOLDER = "firsttoken-kv"
_SUFFIX = ".kv"
_TEMPORARY = ".tmp"
_NAME = re.compile(r"([0-9a-f]{64})\.kv")


class Folder:
    """Names of shard files in a subfolder of the user's, mode 0700, and the lock that makes one process its writer.

    Whoever has the lock (``writable``) cleans up what writers before it left unfinished; the kernel takes the lock of a
    process that dies. Raises `ConfigError`, naming the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / SUBFOLDER
        self._prefix = f"{self.path}{os.sep}"
        self._lock_fd = -1
        with _config_errors(self.path):
            _make(folder)
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._check_private()
            lock_file = self.path / "lock"
            self._lock_fd = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                self.writable = self._try_lock()
                self.direct = supports_direct(lock_file)
                if self.writable:
                    for name in os.listdir(self.path):
                        if name.endswith(_TEMPORARY):
                            (self.path / name).unlink()
            except BaseException:
                self.unlock()
                raise

    # Text, since a `Path` takes longer to make than the file's header to read.

    def file(self, key: bytes) -> str:
        return f"{self._prefix}{key.hex()}{_SUFFIX}"

    def temporary(self, key: bytes, number: int) -> str:
        """A name that no other write of this process has; no other process writes."""
        return f"{self._prefix}{key.hex()}.{number}{_TEMPORARY}"

    def list(self) -> list[tuple[float, bytes, int]]:
        """Time, key and bytes of each shard file, oldest first. Raises `OSError`."""
        found = []
        with os.scandir(self.path) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match is None:
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # the writer evicted it since
                if stat.S_ISREG(status.st_mode):
                    found.append((status.st_mtime, bytes.fromhex(match[1]), status.st_size))
        found.sort()
        return found

    def free_bytes(self) -> int:
        """What an ordinary user may still write. Raises `OSError`."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def total_bytes(self) -> int:
        """The size of the file system. Raises `OSError`."""
        status = os.statvfs(self.path)
        return status.f_blocks * status.f_frsize

    def sync(self) -> None:
        """Make names durable. Raises `OSError`."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _check_private(self) -> None:
        status = self.path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigError(
                f"{self.path} must be a folder of its own for the disk tier, not a link or a file; remove it"
            )
        if status.st_uid != os.geteuid():
            raise ConfigError(
                f"{self.path} belongs to user {status.st_uid}, and this is user {os.geteuid()}: prompts lie in it. "
                "Give the disk tier a folder of its own for each user"
            )
        if stat.S_IMODE(status.st_mode) != 0o700:
            self.path.chmod(0o700)


def _make(folder: Path) -> None:
    """The last part of the path alone: where more is missing, it may be the mount that failed, and files that are meant
    for another disk would fill this one. Raises `ConfigError` and `OSError`."""
    if not folder.parent.exists():
        raise ConfigError(
            f"the disk tier cannot make {folder}: {folder.parent} does not exist (is it mounted?). Make that folder "
            "first, or name another"
        )
    folder.mkdir(exist_ok=True)


@contextmanager
def _config_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the disk tier cannot use {path}: {error.strerror or error}. Name a folder on a local disk that this user "
            "may write"
        ) from error
