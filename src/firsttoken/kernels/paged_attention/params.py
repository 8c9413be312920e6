"""What attention needs to know about the model and about the step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from firsttoken.kernels.rope import RopeTable


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """Sizes shared by all layers. Query head ``h`` reads KV head ``h // (num_heads // num_kv_heads)``."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeTable

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly: "
                "num_heads must be a multiple of num_kv_heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {self.head_dim}")

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True, eq=False)
class QKNorm:
    """RMSNorm of each query and key head before RoPE: weights ``[head_dim]`` float32, in pair order."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParams:
    """One layer's share: its index in the KV pool and, where the family has it, its QK norm."""

    layer: int
    spec: AttentionSpec
    qk_norm: QKNorm | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The tokens of one request in a step: positions ``start`` to ``start + count - 1``.

    ``block_table`` int64 ``[>= blocks for start + count tokens]`` names the request's KV blocks in order; entries
    past those are not read.
    """

    block_table: Tensor
    start: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 1 or self.start < 0:
            raise ValueError(f"a segment needs start >= 0 and count >= 1, got start={self.start}, count={self.count}")

    @property
    def end(self) -> int:
        """Context length once the step is done."""
        return self.start + self.count
