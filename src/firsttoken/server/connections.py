"""How many connections are held at once: in all, and from one address."""

from __future__ import annotations

import ipaddress
import logging
import resource
from collections import Counter

from firsttoken.server.errors import ApiError, unavailable

log = logging.getLogger(__name__)

# Files that the process needs for other things than connections, and the part of them for those who are turned away.
_OTHER_FILES = 128
_MOST_TOLD = 64


class Connections:
    """Those of one server; ``most_of_one`` None: as many from one address as there may be."""

    def __init__(self, most: int, most_of_one: int | None = None) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._of: Counter[str] = Counter()
        self._all = 0
        self._told = 0

    def enter(self, address: str) -> ApiError | None:
        """Take in one more. If there are enough already, it is not taken, and told why. Whoever has an address of IPv6
        has all of its /64."""
        holder = _holder(address)
        if self._all >= self._most:
            return unavailable(
                f"The server has {self._most} connections, the most that it takes (--max-connections).",
                "too_many_connections",
                outcome="refused",
            )
        if self._most_of_one is not None and self._of[holder] >= self._most_of_one:
            return unavailable(
                f"{address} has {self._most_of_one} connections to this server, the most that it may have "
                "(--max-connections-per-ip): use those again.",
                "too_many_connections",
                outcome="refused",
            )
        self._all += 1
        self._of[holder] += 1
        return None

    def leave(self, address: str) -> None:
        holder = _holder(address)
        self._all -= 1
        self._of[holder] -= 1
        if not self._of[holder]:
            del self._of[holder]

    def enter_to_be_told(self) -> bool:
        """Whether one that was not taken in may stay until it can be told why: over TLS that takes a while."""
        if self._told >= _MOST_TOLD:
            return False
        self._told += 1
        return True

    def leave_told(self) -> None:
        self._told -= 1


def _holder(address: str) -> str:
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:  # of IPv4, or none
        return address
    mapped = found.ipv4_mapped
    return str(mapped) if mapped is not None else str(ipaddress.IPv6Network((int(found) >> 64 << 64, 64)))


def make_room(connections: int) -> None:
    """Raise this process's limit of open files as far as so many connections need, and it may; warns of too few."""
    wanted = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        log.warning(
            "there may be %d open files here (ulimit -n), and --max-connections %d takes %d: the last callers will "
            "wait unanswered; raise the one or lower the other",
            most,
            connections,
            wanted,
        )
