"""What the executor needs to know, every value explicit."""

from __future__ import annotations

from dataclasses import dataclass

from firsttoken.core.kv_format import KVFormat


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """``threads`` is for CPU compute (at most so many when ``adaptive_threads``, which leaves cores to other programs),
    ``max_model_len`` and ``max_step_tokens`` (the most that one step computes: in chunks, or in decode rows) in tokens,
    ``kv_blocks`` in blocks of ``kv_format``. ``deterministic``: a row's bits depend on no other row, and decode rows
    count as chunks."""

    device: str
    dtype: str
    quantization: str
    kv_format: KVFormat
    kv_blocks: int
    max_num_seqs: int
    max_model_len: int
    max_step_tokens: int
    threads: int
    adaptive_threads: bool
    deterministic: bool = False
