"""Host memory for KV blocks: pinned for a GPU piece by piece in the background, given out in runs. Torch-free."""

from firsttoken.kvcache.host.memory import HostMemory, Pinning
from firsttoken.kvcache.host.pool import HostPool, HostStats, blocks_of
from firsttoken.kvcache.host.run_allocator import Run
from firsttoken.kvcache.host.size import available_memory, host_blocks

__all__ = ["HostMemory", "HostPool", "HostStats", "Pinning", "Run", "available_memory", "blocks_of", "host_blocks"]
