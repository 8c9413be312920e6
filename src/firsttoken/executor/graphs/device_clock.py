"""Where the device's clock lies on the host's: the first knows when a step ended, and the second stamps all else."""

from __future__ import annotations

# The two may drift apart by one part in so many: some millionths are usual, a clock that is being set takes more.
DRIFT = 5000


class DeviceClock:
    """The host hears of an end some time after it, and never before. So of all differences of the two clocks that it
    has seen, the least is nearest to the true one; what it was once is believed a little less as time goes by.

    A host that came late for a result then tells so, instead of a step that seems to end when it was looked at.
    """

    __slots__ = ("_ahead_ns", "_heard_ns")

    def __init__(self) -> None:
        self._ahead_ns: int | None = None  # of the host's clock
        self._heard_ns = 0

    def host_ns(self, device_ns: int, now: int) -> int:
        """The host's time of what ended at ``device_ns``, of which it hears ``now``: that or earlier. ``device_ns`` is
        0 where the device has no clock."""
        if not device_ns:
            return now
        ahead = now - device_ns
        if self._ahead_ns is not None:
            ahead = min(ahead, self._ahead_ns + (now - self._heard_ns) // DRIFT)
        self._ahead_ns, self._heard_ns = ahead, now
        return device_ns + ahead
