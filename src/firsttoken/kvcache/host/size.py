"""How much host memory there is for KV, and how many blocks a size comes to."""

from __future__ import annotations

from pathlib import Path

from firsttoken.core.errors import ConfigError
from firsttoken.core.kv_format import KVFormat

GIB = 1 << 30
# Of what is free, the part that may be pinned: pinned pages cannot be swapped, and other programs want memory too.
MOST = 0.9


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that the system can give without swapping, or this container without being ended; 0 where nobody tells."""
    system = _numbers(meminfo).get("MemAvailable:", 0) * 1024
    try:
        limit = int((cgroup / "memory.max").read_text(encoding="ascii"))
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # "max", or no cgroup of our own
        return system
    # What files take of it goes when it is needed.
    stat = _numbers(cgroup / "memory.stat")
    left = limit - used + stat.get("inactive_file", 0) + stat.get("active_file", 0)
    return max(0, min(system, left))


def _numbers(path: Path) -> dict[str, int]:
    """The first two words of each line."""
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def host_blocks(nbytes: int, kv_format: KVFormat, available: int) -> int:
    """Blocks that ``kv_host_memory`` of ``nbytes`` holds; 0 bytes are no host tier. ``available`` bytes are free.

    Raises `ConfigError` for a size that holds no block, and for one that is more than `MOST` of what is free.
    """
    if nbytes == 0:
        return 0
    if nbytes < 0:
        raise ConfigError(f"kv_host_memory must be 0 (no host tier) or more bytes, got {nbytes}")
    each = kv_format.bytes_per_block
    if nbytes < each:
        raise ConfigError(f"kv_host_memory of {nbytes} bytes holds no KV block ({each} bytes each): give more, or 0")
    if nbytes > MOST * available:
        raise ConfigError(
            f"kv_host_memory of {nbytes / GIB:.1f} GiB is more than {MOST:.0%} of the {available / GIB:.1f} GiB of "
            f"host memory that are free: lower it to {int(MOST * available / GIB * 10) / 10} GiB"
        )
    return nbytes // each
