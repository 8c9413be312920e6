"""How an engine is put together with tiers, and that its loop looks after them."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from firsttoken.core.kv_format import KVFormat
from firsttoken.engine.config import EngineConfig
from firsttoken.engine.loop import HEARTBEAT_S
from firsttoken.engine.tiers import kv_name
from firsttoken.executor.config import ExecutorConfig
from firsttoken.kvcache.tiers import cost
from firsttoken.scheduler.budget import TokenCap
from tests.end_to_end.test_sameness import Engine
from tests.end_to_end.test_tiers_sameness import PARAMS, TINY, make_prompts


def config(**changes: Any) -> EngineConfig:
    executor = ExecutorConfig(
        device="cpu",
        dtype="float32",
        quantization="none",
        kv_format=KVFormat(dtype="float32", layers=1, kv_heads=1, head_dim=8),
        kv_blocks=8,
        max_num_seqs=1,
        max_model_len=64,
        max_step_tokens=64,
        threads=1,
        adaptive_threads=False,
    )
    return EngineConfig(
        model="m",
        executor=dataclasses.replace(executor, **changes),
        prefix_caching=True,
        budget=TokenCap(alone=64, mixed=16),
        step_time=None,  # type: ignore[arg-type]
        in_flight=1,
    )


def test_kv_is_named_by_all_that_its_values_depend_on() -> None:
    names = {
        kv_name(config(), "a"),
        kv_name(config(), "b"),
        kv_name(config(dtype="bfloat16"), "a"),
        kv_name(config(quantization="packed"), "a"),
        kv_name(config(deterministic=True), "a"),
    }
    assert len(names) == 5
    assert kv_name(config(threads=7, kv_blocks=9, max_num_seqs=3), "a") in names


@pytest.mark.clock
def test_an_idle_engine_does_not_sleep_over_a_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "WORTH", 1e9)
    prompts = make_prompts(3, 150)
    host = 64 * 13824
    first = Engine(TINY, kv_host_memory=host, kv_disk=str(tmp_path))
    first.run(prompts, PARAMS)
    first.stop()
    engine = Engine(TINY, kv_host_memory=host, kv_disk=str(tmp_path))
    took = []
    for prompt in prompts:
        began = time.monotonic()
        _, [delta] = engine.run([prompt], PARAMS)
        took.append(time.monotonic() - began)
        assert delta.cached_disk == 144
    engine.run([[7]], PARAMS)  # its step tells of the copies before
    engine.stop()
    block_bytes = engine.info.bytes_per_block
    assert sum(step.copied_bytes_in for step in engine.steps) == 3 * 144 // 16 * block_bytes
    assert all((step.copy_ns > 0) == bool(step.copied_bytes_in + step.copied_bytes_out) for step in engine.steps)
    assert min(took) < HEARTBEAT_S / 2


def test_the_start_says_what_kv_goes_on_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiers = {"kv_host_memory": 64 * 13824, "kv_disk": str(tmp_path), "kv_disk_size": 1 << 60, "kv_eviction": "lru"}
    with caplog.at_level(logging.INFO, "firsttoken.engine.tiers"):
        writer, reader = Engine(TINY, **tiers), Engine(TINY, **tiers)
        writer.stop()
        reader.stop()
    said = [(record.levelname, record.getMessage()) for record in caplog.records if record.name.endswith("tiers")]
    line = f"KV goes on to 0.8 MiB of host memory and files in {tmp_path} (1073741824.0 GiB at most); eviction: lru"
    assert [text for level, text in said if level == "INFO" and text.startswith("KV goes")] == [line, line]
    too_large, reads = [text for level, text in said if level == "WARNING"]
    assert "lower --kv-disk-size" in too_large
    assert reads.startswith(f"another process writes {tmp_path}")
