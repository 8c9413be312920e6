"""What a user may say about the disk tier."""

from __future__ import annotations

from pathlib import Path

import msgspec

from firsttoken.core.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30


class DiskConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of the disk tier.

    Files lie in a subfolder of ``folder`` that the store makes itself and that nobody but its user may enter; together
    they take at most ``cap_bytes``, and nothing is written that would leave less than ``margin_bytes`` of the file
    system free. ``threads`` read and write; all but one of them may write at a time, so that a read need not wait for
    writes. At most ``max_reads`` and ``max_writes`` are in hand; more are refused. ``direct`` asks for O_DIRECT where
    file system and buffer allow it. ``sync`` makes a file's bytes durable before its name appears. Another process
    writes the folder already: then this one only reads, and looks for new files every ``refresh_s`` seconds.
    Raises `ConfigError`.
    """

    folder: Path
    cap_bytes: int
    threads: int = 4
    max_reads: int = 256
    max_writes: int = 64
    margin_bytes: int = GIB
    direct: bool = True
    sync: bool = True
    refresh_s: float = 10.0

    def __post_init__(self) -> None:
        if self.cap_bytes < MIB:
            raise ConfigError(f"the disk tier's cap must be at least 1 MiB, got {self.cap_bytes} bytes")
        if not 1 <= self.threads <= 64:
            raise ConfigError(f"the disk tier works with 1 to 64 threads, got {self.threads}")
        for name in ("max_reads", "max_writes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of the disk tier must be at least 1, got {getattr(self, name)}")
        if self.margin_bytes < 0:
            raise ConfigError(f"the disk tier's margin must be 0 bytes or more, got {self.margin_bytes}")
        if not self.refresh_s > 0:
            raise ConfigError(f"refresh_s of the disk tier must be above 0, got {self.refresh_s}")
