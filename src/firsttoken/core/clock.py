"""The one clock. Every stamp in the system is CLOCK_MONOTONIC in nanoseconds.

On Linux and macOS that clock is shared by all processes of a host, so a stamp taken in the API process and one
taken in the engine process may be subtracted from each other.
"""

from time import monotonic_ns as now_ns

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

__all__ = ["NS_PER_MS", "NS_PER_S", "now_ns"]
