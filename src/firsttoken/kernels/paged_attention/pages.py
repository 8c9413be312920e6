"""What the GPU kernels' callers read off a pool's tensor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from firsttoken.kernels.paged_attention.rounded import FIELDS

PAGE = 16
# What decode attention can address of a rounded pool: 256 GiB.
MOST_ELEMENTS = 32 << 32
# Matrix instructions take no fewer columns.
_LEAST_WORDS = 16


@dataclass(frozen=True, slots=True)
class Pages:
    """A pool's sizes. ``words`` of 16 bits a rounded head vector, ``tile`` of K, V and scales of a page's head; both 0
    where elements are kept as they are."""

    layers: int
    kv_heads: int
    head_dim: int
    words: int = 0
    tile: int = 0


def pages_of(kv: Tensor, rounded: str | None) -> Pages:
    """Sizes of ``kv``, whose elements are ``rounded`` to one of `rounded.FIELDS`, or kept as they are. Raises
    ValueError where it is no pool of that format, or one that the kernels cannot read."""
    if rounded is None:
        if kv.dim() != 6 or not kv.is_contiguous() or kv.shape[4] != PAGE:
            raise ValueError(
                f"kv must be contiguous [blocks, layers, 2, kv_heads, {PAGE}, head_dim], got {tuple(kv.shape)}"
            )
        return Pages(kv.shape[1], kv.shape[3], kv.shape[5])
    if rounded not in FIELDS:
        raise ValueError(f"KV is rounded to one of {', '.join(FIELDS)}, got {rounded!r}")
    if kv.dim() != 4 or not kv.is_contiguous():
        raise ValueError(f"rounded kv must be contiguous [blocks, layers, kv_heads, tile], got {tuple(kv.shape)}")
    if kv.numel() > MOST_ELEMENTS:
        raise ValueError(f"rounded kv may have {MOST_ELEMENTS} words of 16 bits, got {kv.numel()}: use fewer blocks")
    scales = 4 if rounded == "int4" else 2
    words, rest = divmod(kv.shape[3] - PAGE * scales, 2 * PAGE)
    if rest or words < _LEAST_WORDS or words & (words - 1):
        raise ValueError(
            f"the GPU attention kernels read {rounded} KV of heads of a power of two, {_LEAST_WORDS * FIELDS[rounded]} "
            f"or more: tiles of {kv.shape[3]} words hold none"
        )
    return Pages(kv.shape[1], kv.shape[2], words * FIELDS[rounded], words, kv.shape[3])
