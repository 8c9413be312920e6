"""The disk tier of the KV cache: shards in files, found again after a restart. Torch-free."""

from firsttoken.kvcache.disk.buffers import aligned_buffer
from firsttoken.kvcache.disk.config import DiskConfig
from firsttoken.kvcache.disk.format import ShardMeta
from firsttoken.kvcache.disk.outcome import DiskHandle, Outcome
from firsttoken.kvcache.disk.stats import DiskStats
from firsttoken.kvcache.disk.store import DiskStore

__all__ = ["DiskConfig", "DiskHandle", "DiskStats", "DiskStore", "Outcome", "ShardMeta", "aligned_buffer"]
