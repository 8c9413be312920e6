"""A small KV cache, its requests, and what becomes of them."""

from __future__ import annotations

from array import array
from typing import Any

from firsttoken.core.kv_format import KVFormat
from firsttoken.core.request import EngineRequest, Request
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import ServiceClass
from firsttoken.kvcache import KVCache

FORMAT = KVFormat(dtype="float32", layers=1, kv_heads=1, head_dim=8, block_tokens=4)


def make_cache(blocks: int, **options: Any) -> KVCache:
    return KVCache(FORMAT, blocks, model="m", **options)


def make_request(number: int, prompt: list[int], salt: str = "", service: ServiceClass = ServiceClass.P2) -> Request:
    return Request(
        EngineRequest(
            id=number,
            prompt=array("I", prompt).tobytes(),
            params=SamplingParams(),
            seed=0,
            max_tokens=100,
            salt=salt,
            service=service,
        )
    )


def findable(cache: KVCache) -> set[int]:
    return {block for shard in cache.index.shards() for block in shard.blocks}


def run_through(cache: KVCache, request: Request) -> list[int]:
    """Admit, compute all known tokens, end as the scheduler does: the blocks it had."""
    admission = cache.admit(request)
    assert admission is not None
    request.num_computed = request.num_tokens
    cache.commit(request)
    request.kept = cache.keep(request)
    cache.release(request)
    request.num_computed = 0
    return admission.blocks
