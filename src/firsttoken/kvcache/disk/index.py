"""Which shards lie on disk, what they take, and which may go. No I/O, no lock of its own."""

from __future__ import annotations

from collections import OrderedDict

from firsttoken.core.service import ServiceClass
from firsttoken.kvcache.disk.kept import KeptFiles
from firsttoken.kvcache.eviction.interface import EvictionPolicy, Shard


class Stored:
    """A shard's file. While somebody ``holds`` it, it is not evicted; it may still be dropped."""

    __slots__ = ("holds", "offered", "parent", "shard")

    def __init__(self, shard: Shard, parent: bytes) -> None:
        self.shard = shard
        self.parent = parent
        self.holds = 0
        self.offered = False


class DiskIndex:
    """The stored shards by key, offered to a policy while nobody reads them and no stored shard continues them.

    *Strangers* are files that nobody here can use (another model's, another version's): known by name only, counted,
    and the first to go, oldest first. ``nbytes`` is of all files; ``kept`` says which go last, of ``keep_bytes`` at
    most. Every operation is O(1) but for the policy's part.
    """

    def __init__(self, policy: EvictionPolicy, keep_bytes: int = 0) -> None:
        self.nbytes = 0
        self.kept = KeptFiles(keep_bytes)
        self._policy = policy
        self._stored: dict[bytes, Stored] = {}
        self._continued: dict[bytes, int] = {}
        self._strangers: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, key: bytes) -> bool:
        return key in self._stored

    @property
    def num_strangers(self) -> int:
        return len(self._strangers)

    def names(self) -> list[bytes]:
        """A copy, strangers included."""
        return [*self._stored, *self._strangers]

    def known(self, key: bytes) -> bool:
        """Whether a file of that name is counted, a stranger's or not."""
        return key in self._stored or key in self._strangers

    def get(self, key: bytes) -> Stored | None:
        return self._stored.get(key)

    def add(self, shard: Shard, parent: bytes, service: ServiceClass, now_ns: int) -> None:
        """A file is there under the shard's key; it replaces any other of that name."""
        self.remove(shard.key, now_ns)
        stored = self._stored[shard.key] = Stored(shard, parent)
        self.nbytes += shard.nbytes
        self._continued[parent] = self._continued.get(parent, 0) + 1
        self.use(stored, service, now_ns)
        self._settle(parent, now_ns)
        self._settle(shard.key, now_ns)

    def add_stranger(self, key: bytes, nbytes: int) -> None:
        """A file of that name is there, younger than all strangers before; nothing happens when it is known."""
        if not self.known(key):
            self._strangers[key] = nbytes
            self.nbytes += nbytes

    def use(self, stored: Stored, service: ServiceClass, now_ns: int) -> None:
        shard = stored.shard
        # It is ranked anew when it is offered again, so that a policy need not look for it among the offered.
        if stored.offered:
            self._policy.withdraw(shard)
        shard.uses += 1
        shard.used_ns = now_ns
        shard.keep_until_ns = self.kept.used(shard.key, now_ns)
        shard.service = min(shard.service, service)
        self._policy.used(shard, service, now_ns)
        if stored.offered:
            self._policy.offer(shard, now_ns)

    def keep(self, key: bytes, nbytes: int, until_ns: int, ttl_ns: int, now_ns: int) -> bool:
        """Keep a file, which has about so many bytes where it is not written yet, until then, and for ``ttl_ns`` after
        each use: what it continues stays with it. False where the quota has no room."""
        stored = self._stored.get(key)
        nbytes = nbytes if stored is None else stored.shard.nbytes
        if not self.kept.keep(key, nbytes, until_ns, ttl_ns, now_ns):
            return False
        if stored is not None:
            if stored.offered:
                self._policy.withdraw(stored.shard)
            stored.shard.keep_until_ns = self.kept.until(key)
            if stored.offered:
                self._policy.offer(stored.shard, now_ns)
        return True

    def hold(self, stored: Stored, now_ns: int) -> None:
        stored.holds += 1
        self._settle(stored.shard.key, now_ns)

    def release(self, stored: Stored, now_ns: int) -> None:
        """It may have been removed meanwhile."""
        stored.holds -= 1
        if self._stored.get(stored.shard.key) is stored:
            self._settle(stored.shard.key, now_ns)

    def remove(self, key: bytes, now_ns: int, *, evicted: bool = False) -> int:
        """Forget a file; its bytes, 0 when none of that name is known."""
        stranger = self._strangers.pop(key, 0)
        self.nbytes -= stranger
        stored = self._stored.pop(key, None)
        if stored is None:
            return stranger
        self.nbytes -= stored.shard.nbytes
        self._policy.left(stored.shard, now_ns, evicted=evicted)
        siblings = self._continued.pop(stored.parent) - 1
        if siblings:
            self._continued[stored.parent] = siblings
        self._settle(stored.parent, now_ns)
        return stored.shard.nbytes

    def evict(self, now_ns: int) -> tuple[bytes, int] | None:
        """Forget the file that should go next: its key and bytes, None when all are in use."""
        if self._strangers:
            key = next(iter(self._strangers))
            return key, self.remove(key, now_ns, evicted=True)
        shard = self._policy.victim(now_ns)
        if shard is None:
            return None
        self.kept.left(shard.key)
        return shard.key, self.remove(shard.key, now_ns, evicted=True)

    def check(self) -> None:
        """Raise `AssertionError` unless the counts are those of the files. O(files)."""
        files = sum(stored.shard.nbytes for stored in self._stored.values())
        assert self.nbytes == files + sum(self._strangers.values()), "bytes are counted wrongly"
        assert not self._stored.keys() & self._strangers.keys(), "a file is known twice"
        parents = [stored.parent for stored in self._stored.values()]
        assert self._continued == {parent: parents.count(parent) for parent in parents}, "continuations are miscounted"
        for key, stored in self._stored.items():
            assert stored.offered == (not stored.holds and key not in self._continued), "offered though it may not go"

    def _settle(self, key: bytes, now_ns: int) -> None:
        """Tell the policy whether a shard may go, where that has changed."""
        stored = self._stored.get(key)
        if stored is None:
            return
        may_go = not stored.holds and key not in self._continued
        if may_go == stored.offered:
            return
        stored.offered = may_go
        if may_go:
            self._policy.offer(stored.shard, now_ns)
        else:
            self._policy.withdraw(stored.shard)
