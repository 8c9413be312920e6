"""KV beyond the device: shards are copied to host memory and files when nobody uses them, and restored when that is
sooner than computing them. Torch-free."""

from firsttoken.kvcache.tiers.cost import RecomputeCost
from firsttoken.kvcache.tiers.restore import Restored
from firsttoken.kvcache.tiers.stats import TierStats
from firsttoken.kvcache.tiers.tiers import Prompt, Tiers

__all__ = ["Prompt", "RecomputeCost", "Restored", "TierStats", "Tiers"]
