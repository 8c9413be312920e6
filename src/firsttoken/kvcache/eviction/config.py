"""What eviction policies are told once."""

from __future__ import annotations

from dataclasses import dataclass

from firsttoken.core.clock import NS_PER_S
from firsttoken.core.errors import ConfigError

# Evicted shards that are remembered at most; each takes some 300 bytes.
MAX_GHOSTS = 1 << 16


def ghosts_of(num_blocks: int) -> int:
    """How many evicted shards are remembered of a tier of so many KV blocks: a shard has several, so they are its
    content several times over."""
    return min(MAX_GHOSTS, num_blocks)


@dataclass(frozen=True)
class EvictionConfig:
    """Times in seconds; those of classes in the order p0, p1, p2. Raises `ConfigError`.

    A shard's score is multiplied by the ``weights`` of the best class of its users. After its last use it is kept for
    ``keep_s`` while a shard that need not be kept can go. The last class's time holds only with ``keep_last_class``:
    where all shards are of that class it protects none, it only forbids to choose. Say so for the lowest tier, if it
    is large enough.

    ``attention_tokens`` is the context at which attention costs as much as all else of a token: what lies deeper in a
    chain is dearer to recompute. 0: that does not count, which finds more on the traces, and saves no less.
    ``ghosts`` is how many evicted shards are remembered.

    ``window_s``, ``window_uses`` and ``max_age_s`` are the specified hybrid's. ``memory_s``, ``slow_return_s`` are the
    default's: how long what it learned counts, and from which gap between two uses on a shard is a slow one.
    """

    weights: tuple[float, float, float] = (2.0, 1.2, 1.0)
    keep_s: tuple[float, float, float] = (900.0, 480.0, 180.0)
    keep_last_class: bool = False
    attention_tokens: int = 0
    ghosts: int = MAX_GHOSTS
    window_s: float = 5.0
    window_uses: int = 3
    max_age_s: float = 600.0
    memory_s: float = 1800.0
    slow_return_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("window_s", "window_uses", "max_age_s", "memory_s", "slow_return_s"):
            _check(name, getattr(self, name), positive=True)
        for name in ("attention_tokens", "ghosts"):
            _check(name, getattr(self, name), positive=False)
        for weight in self.weights:
            _check("each of weights", weight, positive=True)
        for keep in self.keep_s:
            _check("each of keep_s", keep, positive=False)

    @property
    def keep_ns(self) -> tuple[int, int, int]:
        """For how long each class is kept, in ns; 0 where it need not be."""
        p0, p1, p2 = (round(keep * NS_PER_S) for keep in self.keep_s)
        return p0, p1, p2 if self.keep_last_class else 0


def _check(name: str, value: float, *, positive: bool) -> None:
    if not 0 <= value < float("inf") or (positive and value == 0):
        least = "more than 0" if positive else "0 or more"
        raise ConfigError(f"{name} of the eviction must be a number of {least}, got {value!r}")
