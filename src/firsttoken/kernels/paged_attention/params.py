"""What attention needs to know about the model and about the step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from firsttoken.kernels.rope import RopeTable


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """What layers share: a model has one of these for each rope table (Gemma 3 has two).

    Query head ``h`` reads KV head ``h // (num_heads // num_kv_heads)``. ``rope`` None: q and k are not rotated.
    ``alibi_slopes`` float32 ``[num_heads]``: a key ``d`` tokens back gets ``-slope * d`` added to its score (Press et
    al., 2021, "Train Short, Test Long"). ``softcap`` ``c`` turns a score ``s`` into ``c tanh(s / c)`` before anything
    is added to it. ``scale_override`` replaces ``head_dim ** -0.5``. Raises ValueError for what does not fit together.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeTable | None
    alibi_slopes: Tensor | None = None
    softcap: float | None = None
    scale_override: float | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly: "
                "num_heads must be a multiple of num_kv_heads"
            )
        if self.rope is not None and self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {self.head_dim}")
        if self.alibi_slopes is not None and self.alibi_slopes.shape != (self.num_heads,):
            raise ValueError(
                f"ALiBi needs one slope for each of the {self.num_heads} query heads, "
                f"got shape {list(self.alibi_slopes.shape)}"
            )
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be above 0 (None turns it off), got {self.softcap}")

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """What q . k is multiplied by."""
        return float(self.head_dim**-0.5) if self.scale_override is None else self.scale_override


@dataclass(frozen=True, slots=True, eq=False)
class QKNorm:
    """RMSNorm of each query and key head before RoPE: weights ``[head_dim]`` float32, in pair order."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParams:
    """One layer's share: its index in the KV pool and, where the family has them, its QK norm and its window.

    With a ``window`` of ``w`` tokens the token at position ``p`` sees positions ``p - w + 1`` to ``p``.
    """

    layer: int
    spec: AttentionSpec
    qk_norm: QKNorm | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window holds at least the token itself, got {self.window}")


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
