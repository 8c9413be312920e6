"""Decode attention: QK norm, RoPE, the write of the new K and V, and attention over pages, in one kernel.

Two ways to cut the work: a fixed number of splits a row (`triton_split`, few rows), and the keys of all rows dealt out
evenly (`triton_balanced`, many). In both, parts of a row meet in the same kernel: each is stored and counted, and who
comes last combines them all, in fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from firsttoken.kernels.launch import launch, next_power_of_two
from firsttoken.kernels.paged_attention.gpu_config import BalancedConfig, DecodeConfig
from firsttoken.kernels.paged_attention.pages import PAGE, Pages, pages_of
from firsttoken.kernels.paged_attention.triton import INTERPRETED, LOG2E, compute_type, kv_format_of
from firsttoken.kernels.paged_attention.triton_balanced import balanced_kernel
from firsttoken.kernels.paged_attention.triton_decode_rounded import rounded_balanced_kernel, rounded_split_kernel
from firsttoken.kernels.paged_attention.triton_split import split_kernel

# Elements of the parts that a combining program holds at once, a warp: 64 a thread.
_COMBINED = 2048


@dataclass(frozen=True, slots=True, eq=False)
class DecodeWorkspace:
    """Where programs leave the parts of a row: one for all layers of a step, never shared by two streams.

    ``parts [cells, kv_heads, group, head_dim]`` and ``weights [cells, kv_heads, group]`` (log2 of a part's softmax
    sum), float32 and flat; ``arrived`` is int32 ``[rows * kv_heads]``, zero at rest.
    """

    parts: Tensor
    weights: Tensor
    arrived: Tensor

    @classmethod
    def allocate(
        cls, cells: int, rows: int, num_heads: int, kv_heads: int, head_dim: int, device: torch.device | str
    ) -> DecodeWorkspace:
        """Room for ``rows`` token rows and the ``cells`` that their config asks for (`DecodeConfig.cells`)."""
        weights = torch.zeros(max(1, cells) * num_heads, dtype=torch.float32, device=device)
        parts = torch.zeros(len(weights) * head_dim, dtype=torch.float32, device=device)
        return cls(parts, weights, torch.zeros(rows * kv_heads, dtype=torch.int32, device=device))


def decode(
    qkv: Tensor,
    kv: Tensor,
    layer: int,
    block_tables: Tensor,
    slots: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    num_heads: int,
    scale: float,
    cos_sin: Tensor | None,
    workspace: DecodeWorkspace,
    config: DecodeConfig | BalancedConfig,
    qk_norm: tuple[Tensor, Tensor, float] | None = None,
    slopes: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    rounded: str | None = None,
    pdl: bool = False,
    early_rows: bool = False,
) -> Tensor:
    """Attend from one new token a row to its context, and put the token's K and V in the cache.

    ``qkv [T, (Hq + 2 Hkv) * D]`` is the raw projection (row stride free), q and k in pair order. ``kv`` is the pool
    ``[blocks, layers, 2, Hkv, 16, D]``, contiguous, bfloat16 or float32; with ``rounded`` ("int8", "fp8" or "int4")
    int16 ``[blocks, layers, Hkv, tile]`` (`rounded.TileLayout`). ``block_tables`` int32 ``[slots, W]``;
    ``slots`` and ``positions`` int32 ``[T]``, a row's position is that of its new token, -1 for a padding row, which
    reads and writes nothing. No two rows may have the same slot. ``out [T, Hq * D]``.

    ``scale`` multiplies the scores; ``cos_sin`` float32 ``[max positions, D / 2, 2]`` or None for no RoPE;
    ``qk_norm`` is (q weight, k weight, eps), weights float32 ``[D]`` in pair order; ``slopes`` float32 ``[Hq]`` for
    ALiBi; ``window`` counts the keys a token sees, its own included; ``softcap`` is Gemma 2's. ``pdl`` launches
    dependently; ``early_rows`` promises that tables, slots and positions are older than every kernel still running.

    Raises ValueError for shapes or types that do not fit together.
    """
    pages = pages_of(kv, rounded)
    rows, kv_heads, head_dim = slots.shape[0], pages.kv_heads, pages.head_dim
    _check(qkv, pages, layer, positions, out, num_heads, workspace, config, window, rounded)
    group = num_heads // kv_heads
    group_tile, padded_dim = next_power_of_two(group), next_power_of_two(head_dim)
    combined = max(1, _COMBINED * config.warps // (group_tile * padded_dim))
    q_weight, k_weight, eps = qk_norm if qk_norm is not None else (None, None, 0.0)
    kernel, grid, sizes, constants = _division(config, rows, kv_heads, rounded is not None)
    if rounded is not None:
        constants |= {"W": pages.words, "TILE": pages.tile, "KV_FORMAT": rounded, "PLAIN": INTERPRETED}
        constants["COMPUTE"] = tl.float32 if INTERPRETED else tl.bfloat16
        # int8 is multiplied as 1,024 and more, which bfloat16 has not the digits for.
        constants["QUERY"] = tl.float16 if rounded == "int8" and not INTERPRETED else constants["COMPUTE"]
    else:
        constants |= {"DOT": config.dot, "KV_FORMAT": kv_format_of(kv), "COMPUTE": compute_type(kv)}
    options = {"maxnreg": config.max_registers} if config.max_registers is not None else {}
    launch(
        kernel,
        grid,
        qkv,
        kv,
        block_tables,
        slots,
        positions,
        cos_sin,
        q_weight,
        k_weight,
        slopes,
        out,
        workspace.parts,
        workspace.weights,
        workspace.arrived,
        qkv.stride(0),
        out.stride(0),
        block_tables.stride(0),
        kv.stride(0),
        layer * kv.stride(1),
        eps,
        scale if softcap is not None else scale * LOG2E.value,
        softcap or 0.0,
        *sizes,
        **constants,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_TILE=max(8 if rounded is not None else 16, group_tile) if config.dot else group_tile,
        GROUP_PARTS=group_tile,
        D=head_dim,
        DP=padded_dim,
        PAGE=PAGE,
        BT=config.block_tokens,
        COMBINED=min(combined, config.most_parts),
        WINDOW=window or 0,
        ROPE=cos_sin is not None,
        NORM=qk_norm is not None,
        ALIBI=slopes is not None,
        SOFTCAP=softcap is not None,
        STAGES=config.stages,
        EARLY_ROWS=early_rows,
        pdl=pdl,
        num_warps=config.warps,
        **options,
    )
    return out


def _division(
    config: DecodeConfig | BalancedConfig, rows: int, kv_heads: int, rounded: bool
) -> tuple[Any, tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    """The kernel, its grid, its runtime sizes and its constants for a way to cut the work."""
    if isinstance(config, BalancedConfig):
        grid: tuple[int, ...] = (kv_heads, config.programs)
        constants = {"ROWS": next_power_of_two(rows), "MIN_SHARE": config.min_share}
        return rounded_balanced_kernel if rounded else balanced_kernel, grid, (rows, config.programs), constants
    programs = config.splits + 1 if config.splits > 1 else 1
    constants = {"SPLITS": config.splits, "MIN_SPLIT": config.min_split}
    return rounded_split_kernel if rounded else split_kernel, (kv_heads, rows, programs), (), constants


def _check(
    qkv: Tensor,
    pages: Pages,
    layer: int,
    positions: Tensor,
    out: Tensor,
    num_heads: int,
    workspace: DecodeWorkspace,
    config: DecodeConfig | BalancedConfig,
    window: int | None,
    rounded: str | None,
) -> None:
    kv_heads, head_dim = pages.kv_heads, pages.head_dim
    rows = positions.shape[0]
    if not 0 <= layer < pages.layers:
        raise ValueError(f"layer {layer} is not in a pool of {pages.layers} layers")
    if rounded is not None and not config.dot:
        raise ValueError(f"{rounded} KV is multiplied by matrix instructions alone: set dot in the config")
    if num_heads % kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {kv_heads} KV heads evenly")
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for rotated pairs, got {head_dim}")
    if qkv.shape != (rows, (num_heads + 2 * kv_heads) * head_dim) or qkv.stride(1) != 1:
        raise ValueError(
            f"qkv must be [{rows}, {(num_heads + 2 * kv_heads) * head_dim}] with contiguous rows, "
            f"got {tuple(qkv.shape)} with strides {qkv.stride()}"
        )
    if out.shape != (rows, num_heads * head_dim) or out.stride(1) != 1:
        raise ValueError(f"out must be [{rows}, {num_heads * head_dim}] with contiguous rows, got {tuple(out.shape)}")
    room, needed = workspace.weights.shape[0], config.cells(rows) * num_heads
    if room < needed or workspace.arrived.shape[0] < rows * kv_heads:
        raise ValueError(
            f"the workspace has room for {room} parts and {workspace.arrived.shape[0]} counters, {needed} and "
            f"{rows * kv_heads} are needed: allocate it with this config and number of rows"
        )
    if isinstance(config, BalancedConfig) and config.programs <= rows:
        raise ValueError(f"{rows} rows need more than {config.programs} programs a KV head")
    if window is not None and window < 1:
        raise ValueError(f"a window must hold at least the token itself, got {window}")
