"""Where in prompts tokens are found, and where not."""

from __future__ import annotations

from bisect import bisect_right

from firsttoken.core.service import ServiceClass
from firsttoken.transport.kv_report import PromptTokens

# Where buckets of positions begin: powers of two, since what is shared (system prompts, early turns) is short beside
# the longest prompts.
EDGES = [0, *(512 << power for power in range(9))]

_KINDS = PromptTokens.__struct_fields__


class TokenHeat:
    """Counts the prompt tokens of each class by tier and position."""

    def __init__(self) -> None:
        self._counts = [[[0] * len(EDGES) for _ in _KINDS] for _ in ServiceClass]

    def add(self, service: int, device: int, host: int, disk: int, prompt: int) -> None:
        """A prompt of so many tokens, of which those of each tier were found, one tier behind the other."""
        at = 0
        for counts, end in zip(
            self._counts[service], (device, device + host, device + host + disk, prompt), strict=True
        ):
            while at < end:
                bucket = bisect_right(EDGES, at) - 1
                stop = min(end, EDGES[bucket + 1]) if bucket + 1 < len(EDGES) else end
                counts[bucket] += stop - at
                at = stop

    def read(self) -> list[PromptTokens]:
        return [PromptTokens(*(list(counts) for counts in kinds)) for kinds in self._counts]
