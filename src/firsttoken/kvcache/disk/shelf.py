"""The files and what is known of them, kept in step: room, new names, removal, and the look through the folder."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence

from firsttoken.core.clock import now_ns
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.disk.buffers import Scratch
from firsttoken.kvcache.disk.files import read_header
from firsttoken.kvcache.disk.folder import Folder
from firsttoken.kvcache.disk.format import Header
from firsttoken.kvcache.disk.index import DiskIndex, Stored
from firsttoken.kvcache.disk.outcome import Outcome
from firsttoken.kvcache.disk.space_watch import SpaceWatch
from firsttoken.kvcache.disk.stats import Complaints, Counters
from firsttoken.kvcache.eviction.interface import Shard

# Files that the scan looks at before it enters any, and those that it enters at a time: the engine waits for the lock
# meanwhile, some ten microseconds a file.
_BATCH = 512
_ENTERED = 16

Look = Callable[[Sequence[bytes]], list[Header | Outcome]]
"""What the files of these keys say of themselves (`Shelf.look`), perhaps by several threads."""
# A write gives way to others on the file system by at most so many times its own bytes.
_GIVE_WAY = 2


class Shelf:
    """``lock`` guards the index and the counters and is never held during I/O, since the engine's thread takes it.

    ``_names`` is held by whoever changes names on disk, so that a name and the index's entry change together: else one
    worker could remove the file that another has just put there. It is taken before ``lock``, by workers only.
    """

    def __init__(
        self, folder: Folder, index: DiskIndex, identity: bytes, cap_bytes: int, margin_bytes: int, counters: Counters
    ) -> None:
        self.lock = threading.Lock()
        self.complaints = Complaints()
        self.space = SpaceWatch(folder.path, margin_bytes)
        self._folder = folder
        self._index = index
        self._identity = identity
        self._cap_bytes = cap_bytes
        self._margin_bytes = margin_bytes
        self._counters = counters
        self._names = threading.Lock()
        # Bytes that are on disk, or will be, and not in the index: being written, being removed, or not to be removed.
        self._beside = 0

    def error(self, error: OSError, doing: str) -> None:
        """Count what the system said, and tell it in the log now and then."""
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        with self.lock:
            self._counters.errors[name] += 1
        self.complaints.about(f"{doing} {name}", f"{doing} failed: {error}")

    # ------------------------------------------------------------------ writing

    def reserve(self, nbytes: int) -> Outcome | None:
        """Make room for a file, evicting others, until `publish` uses it or `settle` gives it back. Or say why there is
        none."""
        with self._names:
            while not self._fits(nbytes):
                if not self._evict():
                    return Outcome.NO_SPACE
            given = 0
            while not self._leaves_margin(nbytes):
                freed = self._evict() if given < _GIVE_WAY * nbytes else 0
                if not freed:
                    self._tell_short(nbytes)
                    return Outcome.NO_SPACE
                given += freed
            with self.lock:
                self._beside += nbytes
        return None

    def settle(self, nbytes: int) -> None:
        """Reserved room is free again."""
        with self.lock:
            self._beside -= nbytes

    def publish(
        self, temporary: str, shard: Shard, parent: bytes, service: ServiceClass, wanted: Callable[[], bool]
    ) -> Outcome:
        """Give a whole file, for which room is reserved, its name: then DONE, and the room is used. DROPPED where it is
        no longer ``wanted`` (asked under the lock). Raises `OSError`."""
        with self._names:
            os.rename(temporary, self._folder.file(shard.key))
            with self.lock:
                if wanted():
                    self._index.add(shard, parent, service, now_ns())
                    self._beside -= shard.nbytes
                    return Outcome.DONE
                gone = self._index.remove(shard.key, now_ns())
                self._beside += gone
            self._unlink(shard.key, gone)
            return Outcome.DROPPED

    # ------------------------------------------------------------------ removing

    def forget(self, stored: Stored) -> None:
        """A file turned out to be of no use: remove it, unless another has taken its place since."""
        with self._names:
            with self.lock:
                if self._index.get(stored.shard.key) is not stored:
                    return
                nbytes = self._index.remove(stored.shard.key, now_ns())
                self._beside += nbytes
            if self._folder.writable:
                self._unlink(stored.shard.key, nbytes)

    def leaving(self, key: bytes) -> int:
        """Forget a key at once, under the lock; `unlink` must follow. Its bytes, which count until then."""
        nbytes = self._index.remove(key, now_ns())
        self._beside += nbytes
        return nbytes

    def unlink(self, key: bytes, nbytes: int) -> None:
        """Remove the file of a key that was forgotten, unless there is a new one."""
        with self._names:
            with self.lock:
                if self._index.known(key):
                    self._beside -= nbytes
                    return
            self._unlink(key, nbytes)

    # ------------------------------------------------------------------ looking through

    def scan(self, look: Look, stopped: Callable[[], bool]) -> None:
        """Enter the files that are not known yet, oldest first, and (as a reader) forget those that are gone.

        As the writer it removes damaged files and brings what is there under the cap. Never raises for the disk's sake.
        """
        try:
            files = self._folder.list()
        except OSError as error:
            self.error(error, "looking through the folder")
            return
        if not self._folder.writable:
            self._forget_others({key for _, key, _ in files})
        new = [(key, nbytes) for _, key, nbytes in files if not self._index.known(key)]
        for begin in range(0, len(new), _BATCH):
            batch = new[begin : begin + _BATCH]
            headers = look([key for key, _ in batch])
            if stopped():
                return
            for first in range(0, len(batch), _ENTERED):
                some = slice(first, first + _ENTERED)
                with self.lock:
                    found = zip(batch[some], headers[some], strict=True)
                    damaged = [key for (key, nbytes), header in found if self._enter(key, nbytes, header)]
                for key in damaged:
                    self.unlink(key, 0)
        # A margin that others have used up is not for this to keep: nothing goes where nothing comes.
        if self._folder.writable and self.reserve(0) is not None and not self._fits(0):
            self.complaints.about("cap", "more is stored than the cap allows, and it cannot be removed now")

    def look(self, key: bytes, scratch: Scratch) -> Header | Outcome:
        """What the file of a key says of itself, or why that is nothing."""
        try:
            header = read_header(self._folder.file(key), scratch)
        except FileNotFoundError:
            return Outcome.ABSENT
        except OSError as error:
            self.error(error, "looking at a file")
            return Outcome.IO_ERROR
        return header if isinstance(header, Outcome) or header.meta.key == key else Outcome.TOKENS

    def _enter(self, key: bytes, nbytes: int, header: Header | Outcome) -> bool:
        """Under the lock. True for a damaged file that is to be removed."""
        writable = self._folder.writable
        if self._index.known(key) or header is Outcome.ABSENT:
            return False
        if isinstance(header, Header) and header.identity == self._identity:
            shard = Shard(key, header.meta.start, header.meta.num_tokens, header.file_bytes)
            self._index.add(shard, header.meta.parent, ServiceClass.P2, now_ns())
        elif isinstance(header, Header) or header in (Outcome.FORMAT, Outcome.IO_ERROR):
            if writable:
                self._index.add_stranger(key, nbytes)
        elif writable:
            self._counters.damaged += 1
            return True
        return False

    def _forget_others(self, present: set[bytes]) -> None:
        with self.lock:
            for key in self._index.names():
                if key not in present:
                    self._index.remove(key, now_ns())

    # ------------------------------------------------------------------ inside

    def _fits(self, nbytes: int) -> bool:
        with self.lock:
            return self._index.nbytes + self._beside + nbytes <= self._cap_bytes

    def _leaves_margin(self, nbytes: int) -> bool:
        try:
            free = self._folder.free_bytes()
        except OSError as error:
            self.error(error, "asking for free space")
            return False
        with self.lock:
            enough = free >= self._margin_bytes + self._beside + nbytes
        if enough and nbytes:
            self.space.fits(free)
        return enough

    def _tell_short(self, nbytes: int) -> None:
        if not nbytes:  # nobody wanted to write
            return
        try:
            free = self._folder.free_bytes()
        except OSError:  # told already
            return
        with self.lock:
            taken = self._index.nbytes + self._beside
        self.space.refused(free, taken)

    def _evict(self) -> int:
        """Bytes that were freed, 0 when nothing may go. Under ``_names``."""
        with self.lock:
            victim = self._index.evict(now_ns())
            if victim is None:
                return 0
            key, nbytes = victim
            self._beside += nbytes
            self._counters.evicted += 1
        return nbytes if self._unlink(key, nbytes) else 0

    def _unlink(self, key: bytes, nbytes: int) -> bool:
        """Under ``_names``. A file that cannot be removed goes on counting."""
        try:
            os.unlink(self._folder.file(key))
        except FileNotFoundError:
            pass
        except OSError as error:
            self.error(error, "removing a file")
            return False
        self.settle(nbytes)
        return True
