"""Paged attention on the GPU as models call it: decode rows by the fused kernel, chunks by write and prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from firsttoken.kernels.paged_attention.gpu_config import (
    BalancedConfig,
    DecodeConfig,
    decode_config,
    prefill_config,
)
from firsttoken.kernels.paged_attention.params import AttentionParams, AttentionSpec
from firsttoken.kernels.paged_attention.pool import KVPool
from firsttoken.kernels.paged_attention.triton_decode import DecodeWorkspace, decode
from firsttoken.kernels.paged_attention.triton_prefill import prefill
from firsttoken.kernels.paged_attention.triton_write import write_kv
from firsttoken.kernels.rope import RopeTable

ChooseDecode = Callable[[int, int, int, int, int, bool], DecodeConfig | BalancedConfig]
"""The config for (rows, KV heads, head size, longest context, multiprocessors, whether K and V are rounded)."""


class Rows(Protocol):
    """What attention reads of a step; see `models.step_view.StepView`."""

    @property
    def block_tables(self) -> Tensor: ...
    @property
    def slots(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def tiles(self) -> Tensor: ...
    @property
    def decode_rows(self) -> int: ...
    @property
    def pdl(self) -> bool: ...


class GPUAttention:
    """Attention of a model over one KV pool.

    Tables of sines and cosines reach ``max_position``; ``max_rows`` decode rows may be in a step; ``sms`` is the
    number of multiprocessors that work is divided over. ``choose_decode`` finds the config of a number of rows.
    """

    def __init__(
        self,
        pool: KVPool,
        num_heads: int,
        max_position: int,
        max_rows: int,
        sms: int,
        choose_decode: ChooseDecode = decode_config,
    ) -> None:
        self._choose_decode = choose_decode
        self._pool = pool
        self._max_position = max_position
        self._num_heads = num_heads
        self._sms = sms
        # The rope table itself is kept beside what is made of it, so that its id stays its own.
        self._tables: dict[int, tuple[RopeTable, Tensor]] = {}
        self._configs: dict[int, DecodeConfig | BalancedConfig] = {}
        f = pool.format
        self._rounded = f.dtype if f.rounded else None
        self.prefill_config = prefill_config(f.head_dim)
        self.tile_rows = self.prefill_config.tile_tokens
        self._workspace = self._make_workspace(max_rows)

    def attend(self, step: Rows, layer: AttentionParams, qkv: Tensor) -> Tensor:
        """``qkv [T, (Hq + 2 Hkv) * D]``, the raw projection with q and k in pair order -> ``[T, Hq * D]``.

        Writes K and V of the rows to their pages. ``qkv`` is used as work space where chunks are.
        """
        spec = layer.spec
        out = torch.empty((qkv.shape[0], spec.num_heads * spec.head_dim), dtype=qkv.dtype, device=qkv.device)
        rows = step.decode_rows
        if rows:
            self._decode(step, layer, qkv[:rows], out[:rows])
        if rows < qkv.shape[0]:
            self._chunks(step, layer, qkv, out)
        return out

    def _decode(self, step: Rows, layer: AttentionParams, qkv: Tensor, out: Tensor) -> None:
        spec, rows = layer.spec, len(qkv)
        decode(
            qkv,
            self._pool.storage,
            layer.layer,
            step.block_tables,
            step.slots[:rows],
            step.positions[:rows],
            out,
            num_heads=spec.num_heads,
            scale=spec.scale,
            cos_sin=self._table(spec),
            workspace=self._workspace,
            config=self._config(rows),
            qk_norm=_norm(layer),
            slopes=spec.alibi_slopes,
            window=layer.window,
            softcap=spec.softcap,
            rounded=self._rounded,
            pdl=step.pdl,
            # Tables, slots and positions come with the step's inputs, before its first kernel.
            early_rows=step.pdl,
        )

    def _chunks(self, step: Rows, layer: AttentionParams, qkv: Tensor, out: Tensor) -> None:
        """Rows from ``decode_rows`` on; ``qkv`` and ``out`` hold all rows, and tiles count from their first."""
        spec, first = layer.spec, step.decode_rows
        # What the hardware copies is whole heads of a power of two, as they are stored.
        same = self._rounded is not None or qkv.dtype == self._pool.storage.dtype
        fresh = not spec.head_dim & (spec.head_dim - 1) and same
        q = qkv[:, : spec.num_heads * spec.head_dim]
        write_kv(
            qkv[first:],
            self._pool.storage,
            layer.layer,
            step.block_tables,
            step.slots[first:],
            step.positions[first:],
            q[first:],
            num_heads=spec.num_heads,
            cos_sin=self._table(spec),
            qk_norm=_norm(layer),
            keep_k=fresh,
            rounded=self._rounded,
        )
        prefill(
            q,
            self._pool.storage,
            layer.layer,
            step.block_tables,
            step.tiles,
            out,
            num_heads=spec.num_heads,
            scale=spec.scale,
            config=self.prefill_config,
            slopes=spec.alibi_slopes,
            window=layer.window,
            softcap=spec.softcap,
            fresh=qkv if fresh else None,
            rounded=self._rounded,
        )

    def _table(self, spec: AttentionSpec) -> Tensor | None:
        """Cosines and sines of each position, float32 ``[max_position, D / 2, 2]``; made once for each rope table."""
        if spec.rope is None:
            return None
        found = self._tables.get(id(spec.rope))
        if found is None:
            found = spec.rope, self._make_table(spec.rope)
            self._tables[id(spec.rope)] = found
        return found[1]

    def _make_table(self, rope: RopeTable) -> Tensor:
        device = rope.inv_freq.device
        if device.type == "meta":
            # Kernels are only compiled here; arithmetic on this device makes torch import its tracer, for seconds.
            return torch.empty((self._max_position, len(rope.inv_freq), 2), dtype=torch.float32, device=device)
        return torch.view_as_real(rope.rotation(torch.arange(self._max_position, device=device))).contiguous()

    def _config(self, rows: int) -> DecodeConfig | BalancedConfig:
        config = self._configs.get(rows)
        if config is None:
            f = self._pool.format
            config = self._choose_decode(rows, f.kv_heads, f.head_dim, self._max_position, self._sms, f.rounded)
            self._configs[rows] = config
        return config

    def _make_workspace(self, max_rows: int) -> DecodeWorkspace:
        """Room for whatever number of rows needs most. All configs share it: at rest it looks the same to each."""
        f, device = self._pool.format, self._pool.storage.device
        cells = max(self._config(rows).cells(rows) for rows in range(1, max_rows + 1))
        return DecodeWorkspace.allocate(cells, max_rows, self._num_heads, f.kv_heads, f.head_dim, device)


def _norm(layer: AttentionParams) -> tuple[Tensor, Tensor, float] | None:
    norm = layer.qk_norm
    return None if norm is None else (norm.q_weight, norm.k_weight, norm.eps)
