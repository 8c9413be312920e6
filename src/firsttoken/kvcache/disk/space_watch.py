"""Tells in the log when the disk has become too full to write files, and when it no longer is."""

from __future__ import annotations

import logging
from pathlib import Path

from firsttoken.kvcache.disk.config import MIB

log = logging.getLogger(__name__)

# It is told to be over once so much more than the margin is free: else each file that comes and goes would be told.
_CLEARLY = 1.25


class SpaceWatch:
    """Each change once, however many writes it concerns. ``is_short``: what was told last."""

    def __init__(self, folder: Path, margin_bytes: int) -> None:
        self.is_short = False
        self._folder = folder
        self._margin_bytes = margin_bytes

    def refused(self, free: int, taken: int) -> None:
        """A file could not be written, as only ``free`` bytes are; files take ``taken`` bytes."""
        if self.is_short:
            return
        self.is_short = True
        log.warning(
            "the file system of %s has only %d MiB free, and %d MiB are left to others (the margin): KV is not written "
            "to files any more, what is there is read. Free some space there, or start with a --kv-disk-size below the "
            "%d MiB that files take now",
            self._folder,
            free // MIB,
            self._margin_bytes // MIB,
            taken // MIB,
        )

    def fits(self, free: int) -> None:
        """A file can be written."""
        if self.is_short and free >= _CLEARLY * self._margin_bytes:
            self.is_short = False
            log.warning(
                "the file system of %s has %d MiB free: KV is written to files again", self._folder, free // MIB
            )
