"""What is said once, at the start, of a folder that can be used but will not keep what its user expects."""

from __future__ import annotations

from firsttoken.kvcache.disk.config import GIB, MIB, DiskConfig
from firsttoken.kvcache.disk.folder import Folder
from firsttoken.kvcache.disk.space_watch import SpaceWatch


def start_warnings(folder: Folder, config: DiskConfig, space: SpaceWatch) -> list[str]:
    """A sentence each; none where all is well. ``space`` is spared to tell the same once more."""
    named = config.folder
    if not folder.writable:
        return [f"another process writes {named}: this one only reads there, and stores nothing"]
    try:
        free, total = folder.free_bytes(), folder.total_bytes()
    except OSError as error:
        return [f"the file system of {named} does not say how much is free ({error.strerror}): nothing is stored"]
    found = []
    if free <= config.margin_bytes:
        space.is_short = True
        found.append(
            f"the file system of {named} has {free // MIB} MiB free, and {config.margin_bytes // MIB} MiB are left to "
            "others (the margin): nothing more is stored until there is more"
        )
    if config.cap_bytes > total:
        found.append(
            f"the files in {named} may take {_size(config.cap_bytes)}, but the whole file system has "
            f"{_size(total)}: lower --kv-disk-size, or is the disk not mounted?"
        )
    return found


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes // MIB} MiB"
