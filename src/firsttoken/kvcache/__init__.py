"""The KV cache's book-keeping: block pool, prefix index of shards, and the interface of the copy engine. Torch-free."""

from firsttoken.kvcache.cache import SHARD_TOKENS, Admission, KVCache, KVStats, Probe, ShardTokens
from firsttoken.kvcache.shards import CachedShard

__all__ = ["SHARD_TOKENS", "Admission", "CachedShard", "KVCache", "KVStats", "Probe", "ShardTokens"]
