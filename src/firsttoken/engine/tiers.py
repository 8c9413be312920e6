"""Puts the tiers below the device together."""

from __future__ import annotations

import hashlib
import logging

from firsttoken.core.identity import Identity
from firsttoken.engine.config import EngineConfig
from firsttoken.executor.interface import Executor
from firsttoken.kvcache import KVCache
from firsttoken.kvcache.disk import DiskStore
from firsttoken.kvcache.eviction import EvictionConfig, ghosts_of, make_policy
from firsttoken.kvcache.host import HostMemory, HostPool
from firsttoken.kvcache.tiers import RecomputeCost, Tiers
from firsttoken.scheduler.step_time import StepLoad, StepTime, chunk_pairs

log = logging.getLogger(__name__)

# The first requests after a start are those that files serve; most folders are known after so long.
SCAN_WAIT_S = 0.25
MIB = 1 << 20
GIB = 1 << 30


def kv_name(config: EngineConfig, fingerprint: str) -> str:
    """Names all that the KV of a token depends on beside the tokens and its format: files outlive the engine, and
    another engine may compute the same checkpoint in another way."""
    executor = config.executor
    parts = [fingerprint, executor.dtype, executor.quantization, str(executor.deterministic)]
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()


def attach_tiers(config: EngineConfig, name: str, executor: Executor, kv: KVCache) -> None:
    """Give the cache the tiers that ``config`` asks for; ``name`` is its `kv_name`. Raises `ConfigError` for a folder
    that cannot be used."""
    if not config.host_blocks:
        return
    kv_format = config.executor.kv_format
    disk = None
    if config.disk is not None:
        identity = Identity(model=name, kv_format=kv_format.key)
        lowest = EvictionConfig(keep_last_class=True)
        disk = DiskStore(config.disk, identity, make_policy(config.eviction, lowest))
    memory = HostMemory(config.host_blocks, kv_format.bytes_per_block)
    tiers = Tiers(
        HostPool(memory),
        executor.copies(memory),
        recompute_cost(config.step_time, config.budget.most),
        block_tokens=kv_format.block_tokens,
        policy=make_policy(config.eviction, EvictionConfig(ghosts=ghosts_of(config.host_blocks))),
        disk=disk,
    )
    kv.attach(tiers)
    _tell(config, disk)
    if config.disk is not None and disk is not None and not disk.scanned(SCAN_WAIT_S):
        log.info("%s is still being looked through: what is not known yet is computed", config.disk.folder)


def _tell(config: EngineConfig, disk: DiskStore | None) -> None:
    """One line of what was put together, and a warning of each thing that will not be as asked."""
    host = config.host_blocks * config.executor.kv_format.bytes_per_block
    files = "no files"
    if config.disk is not None:
        files = f"files in {config.disk.folder} ({_size(config.disk.cap_bytes)} at most)"
    log.info("KV goes on to %s of host memory and %s; eviction: %s", _size(host), files, config.eviction)
    for warning in [] if disk is None else disk.start_warnings():
        log.warning("%s", warning)


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.1f} MiB"


def recompute_cost(step_time: StepTime, most: int) -> RecomputeCost:
    """In steps of ``most`` tokens."""

    def seconds(start: int, end: int) -> float:
        ms, at = 0.0, start
        while at < end:
            count = min(most, end - at)
            ms += step_time.ms(StepLoad(0, 0, count, chunk_pairs(at, count), at + count))
            at += count
        return ms / 1e3

    return seconds
