"""Which cached shard goes next: one small interface, and the policies behind it."""

from __future__ import annotations

from collections.abc import Callable

from firsttoken.core.errors import ConfigError
from firsttoken.kvcache.eviction.arc import ARC
from firsttoken.kvcache.eviction.config import EvictionConfig, ghosts_of
from firsttoken.kvcache.eviction.default import LearnedPolicy
from firsttoken.kvcache.eviction.hybrid import Hybrid
from firsttoken.kvcache.eviction.interface import EvictionPolicy, Shard
from firsttoken.kvcache.eviction.lfu import LFU
from firsttoken.kvcache.eviction.lru import LRU
from firsttoken.kvcache.eviction.s3fifo import S3FIFO

__all__ = ["DEFAULT_POLICY", "POLICY_NAMES", "EvictionConfig", "EvictionPolicy", "Shard", "ghosts_of", "make_policy"]

DEFAULT_POLICY = "default"
_POLICIES: dict[str, Callable[[EvictionConfig], EvictionPolicy]] = {
    DEFAULT_POLICY: LearnedPolicy,
    "lru": lambda config: LRU(),
    "lfu": LFU,
    "arc": lambda config: ARC(),
    "s3fifo": lambda config: S3FIFO(),
    "hybrid": Hybrid,
}
POLICY_NAMES = tuple(_POLICIES)


def make_policy(name: str = DEFAULT_POLICY, config: EvictionConfig | None = None) -> EvictionPolicy:
    """A policy of that name for one tier. Raises `ConfigError` for a name that is not known."""
    if name not in _POLICIES:
        raise ConfigError(f"{name!r:.80} is no eviction policy: known are {', '.join(POLICY_NAMES)}")
    return _POLICIES[name](config or EvictionConfig())
