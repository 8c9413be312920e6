"""The KV cache's book-keeping: block pool, prefix index, and the interface of the copy engine. Torch-free."""

from firsttoken.kvcache.cache import Admission, KVCache, KVStats, Probe

__all__ = ["Admission", "KVCache", "KVStats", "Probe"]
