"""Rotary position embedding (Su et al., 2021, "RoFormer"), on heads whose rotated pairs lie side by side.

Hugging Face checkpoints pair element ``i`` with ``i + head_dim / 2``. Attention scores do not change when the elements
of q and k are permuted alike, so `to_pair_order` is applied once to the projections' rows, and every kernel then
rotates neighbours ``(2i, 2i + 1)``: one complex multiplication.
"""

from firsttoken.kernels.rope.table import RopeTable, to_pair_order

__all__ = ["RopeTable", "to_pair_order"]
