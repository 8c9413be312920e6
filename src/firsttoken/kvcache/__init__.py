"""The KV cache's book-keeping: block pool, prefix index of shards, and the interface of the copy engine. Torch-free."""

from firsttoken.kvcache.cache import KVCache
from firsttoken.kvcache.holding import Admission, Probe
from firsttoken.kvcache.registrar import ShardTokens
from firsttoken.kvcache.shards import CachedShard
from firsttoken.kvcache.stats import KVStats

__all__ = ["Admission", "CachedShard", "KVCache", "KVStats", "Probe", "ShardTokens"]
