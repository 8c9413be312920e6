"""Paged attention in torch's fast CPU operations: one gather, then ``baddbmm``, softmax and ``bmm``.

Rows that compute one token are batched; each longer chunk is computed alone, in tiles of queries that stop at their
own last key. ``scaled_dot_product_attention`` is not used: with bfloat16 and one query it is many times slower on the
CPU than the same sum by ``bmm``.

All indices are made once a step, for layer 0; the pool's per-layer views make them valid for every layer. Layers of
another window or another spec have tiles of their own, also made once a step; blocks outside a window are not read.

K and V of a rounded format are brought to the type that they are multiplied in, a layer at a time. A chunk's own tokens
are read back as they are kept, so that where a prompt is cut changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firsttoken.kernels.paged_attention.cpu_gather import (
    Gather,
    compute_type,
    spread_keys,
    write_rows,
    write_tokens,
)
from firsttoken.kernels.paged_attention.params import AttentionParams, AttentionSpec, QKNorm, Segment
from firsttoken.kernels.paged_attention.pool import KVPool
from firsttoken.kernels.rope import RopeTable

# Batched rows are padded to the longest of their group. A further group costs about as much time as reading this
# many padded blocks.
PADDED_BLOCKS = 64
QUERY_TILE = 128
# Bound on the score matrix of one tile, in elements: what keeps a long context's memory in check.
MAX_SCORES = 1 << 24
# Decode rows with at most this many (padded) keys in sum are computed in float32: a bfloat16 product costs 10 us more
# to start and only wins once there is something to read.
FLOAT32_KEYS = 256


class AttentionContext:
    """One step's view of the KV pool: where each token is written, and which tiles each row reads.

    Build once a step with `build`; the model calls `begin` once and `attend` once a layer. Invariant: in every block
    that a row holds, slots past the row's length hold finite numbers, so that their masked weights (exactly zero) can
    not turn into NaN. A block that a step begins but does not fill is zeroed first, whatever was in it.
    """

    __slots__ = ("_longest", "_num_tokens", "_pool", "_readers", "_rotations", "_segments", "_write_rows")

    def __init__(self, pool: KVPool, segments: Sequence[Segment], rows: Tensor) -> None:
        self._pool = pool
        self._segments = segments
        self._longest = max(segment.end for segment in segments)
        self._write_rows = rows
        self._num_tokens = sum(segment.count for segment in segments)
        self._rotations: dict[AttentionSpec, Tensor] | None = None
        self._readers: dict[tuple[AttentionSpec, int | None], _Reader] = {}

    @classmethod
    @torch.inference_mode()
    def build(cls, pool: KVPool, segments: Sequence[Segment]) -> AttentionContext:
        """``segments`` in the order of the step's token rows. Raises ValueError when a block table is too short."""
        if not segments:
            raise ValueError("a step needs at least one segment")
        block_tokens = pool.format.block_tokens
        for segment in segments:
            if segment.block_table.shape[0] * block_tokens < segment.end:
                raise ValueError(
                    f"a block table of {segment.block_table.shape[0]} blocks cannot hold {segment.end} tokens "
                    f"({block_tokens} a block): append blocks before the step"
                )
        _zero_begun_blocks(pool, segments)
        return cls(pool, segments, write_rows(pool, segments))

    @torch.inference_mode()
    def begin(self, specs: Sequence[AttentionSpec], positions: Tensor) -> None:
        """Make the step's rotations: ``specs`` are all of the model's, ``positions`` int64 ``[T]``, one a token row."""
        if positions.shape[0] != self._num_tokens:
            raise ValueError(f"the segments hold {self._num_tokens} tokens, got {positions.shape[0]} positions")
        self._rotations = {spec: _rotation(spec, spec.rope, positions) for spec in specs if spec.rope is not None}

    def attend(self, layer: AttentionParams, qkv: Tensor) -> Tensor:
        """``qkv [T, (Hq + 2 Hkv) * D]``, the raw projection with q and k in pair order -> ``[T, Hq * D]``.

        Call it within ``torch.inference_mode()``, as the model does around all layers.
        """
        assert self._rotations is not None, "begin() comes before attend()"
        spec, pool = layer.spec, self._pool
        heads = qkv.view(qkv.shape[0], -1, spec.head_dim)
        wide = heads.float()
        if layer.qk_norm is not None:
            wide = _normalise(wide, spec, layer.qk_norm)
        if spec.rope is not None:
            pairs = torch.view_as_complex(wide.view(*wide.shape[:2], -1, 2))
            wide = torch.view_as_real(pairs * self._rotations[spec]).view(wide.shape)
        wide = spread_keys(pool, wide, spec.num_heads)
        q = wide[:, : spec.num_heads]
        if spec.rope is None:
            q = q * spec.scale
        write_tokens(pool, layer.layer, self._write_rows, wide[:, spec.num_heads :])
        return self._reader(spec, layer.window, qkv.dtype).attend(pool.tile_rows[layer.layer], q, qkv.dtype)

    def _reader(self, spec: AttentionSpec, window: int | None, dtype: torch.dtype) -> _Reader:
        if window is not None and window >= self._longest:
            window = None
        reader = self._readers.get((spec, window))
        if reader is None:
            reader = self._readers[spec, window] = _Reader(
                self._pool, self._segments, spec, window, compute_type(self._pool, dtype)
            )
        return reader


class _Reader:
    """The tiles that each row reads in layers of one spec and window, and the sums over them."""

    __slots__ = ("_chunks", "_groups", "_num_tokens", "_spec")

    def __init__(
        self,
        pool: KVPool,
        segments: Sequence[Segment],
        spec: AttentionSpec,
        window: int | None,
        dtype: torch.dtype,
    ) -> None:
        rows, singles = 0, []
        self._spec = spec
        self._chunks: list[_Chunk] = []
        for segment in segments:
            if segment.count == 1:
                singles.append(_Single(rows, segment, _first_block(segment, window, pool)))
            else:
                self._chunks.append(_Chunk(pool, segment, rows, spec, window, dtype))
            rows += segment.count
        self._num_tokens = rows
        groups = _group_by_length(singles, pool.format.block_tokens)
        self._groups = [_DecodeGroup(pool, group, spec, window, dtype) for group in groups]

    def attend(self, tiles: Tensor, q: Tensor, dtype: torch.dtype) -> Tensor:
        """``q [T, Hq, D]`` float32, rotated and scaled, over a layer's ``tiles`` -> ``[T, Hq * D]`` in ``dtype``."""
        if len(self._groups) == 1 and not self._chunks and self._groups[0].in_order:
            return self._groups[0].attend(tiles, q).to(dtype)
        spec = self._spec
        out = torch.empty(self._num_tokens, spec.num_heads * spec.head_dim, dtype=dtype, device=q.device)
        for group in self._groups:
            out[group.rows] = group.attend(tiles, q[group.rows]).to(dtype)
        for chunk in self._chunks:
            chunk.attend(tiles, q, out)
        return out


@dataclass(frozen=True, slots=True)
class _Single:
    """A row that computes one token; its keys begin with block ``first_block`` of its table."""

    row: int
    segment: Segment
    first_block: int


class _DecodeGroup:
    """Rows that compute one token each, padded to the same number of blocks.

    A row is padded with its own last block, never with another's: what is masked is also never a stranger's data.
    """

    __slots__ = ("_spec", "count", "dtype", "gather", "in_order", "mask", "rows")

    def __init__(
        self, pool: KVPool, members: list[_Single], spec: AttentionSpec, window: int | None, dtype: torch.dtype
    ) -> None:
        f = pool.format
        indices = [member.row for member in members]
        self._spec = spec
        self.count = len(members)
        self.rows = torch.tensor(indices)
        self.in_order = indices == list(range(self.count))
        held = [member.segment.block_table[member.first_block : f.blocks_for(member.segment.end)] for member in members]
        widest = max(len(table) for table in held)
        tables = torch.stack([_padded(table, widest) for table in held])
        few = self.count * widest * f.block_tokens <= FLOAT32_KEYS
        self.dtype = torch.float32 if few else dtype
        self.gather = Gather(pool, tables, self.dtype)
        ends = [member.segment.end - member.first_block * f.block_tokens for member in members]
        self.mask = self._mask(torch.tensor(ends), widest * f.block_tokens, window)

    def _mask(self, ends: Tensor, width: int, window: int | None) -> Tensor:
        """What is added to the scores, ``[rows * kv_heads, 1 or group, width]``; ``ends [rows]`` counts from a row's
        first key."""
        spec = self._spec
        ends = ends.repeat_interleave(spec.num_kv_heads)[:, None, None]
        keys = torch.arange(width)
        hidden = keys >= ends
        if window is not None:
            hidden |= keys < ends - window
        if spec.alibi_slopes is None:
            bias = torch.zeros(hidden.shape, dtype=self.dtype)
        else:
            slopes = spec.alibi_slopes.view(spec.num_kv_heads, spec.group, 1).repeat(self.count, 1, 1)
            bias = (slopes * (keys - (ends - 1))).to(self.dtype)
        return bias.masked_fill_(hidden, float("-inf"))

    def attend(self, tiles: Tensor, q: Tensor) -> Tensor:
        """``q [rows, Hq, D]`` float32, rotated and scaled -> ``[rows, Hq * D]``."""
        spec = self._spec
        batch = self.count * spec.num_kv_heads
        keys, values = self.gather.read(tiles)
        queries = q.to(self.dtype).reshape(batch, spec.group, spec.head_dim)
        if spec.softcap is None:
            scores = torch.baddbmm(self.mask, queries, keys.transpose(1, 2))
        else:
            scores = _capped(torch.bmm(queries, keys.transpose(1, 2)), spec.softcap).add_(self.mask)
        return torch.bmm(scores.softmax(-1), values).view(self.count, -1)


class _Chunk:
    """Several consecutive tokens of one request: causal among themselves, all of the context before them that the
    window leaves."""

    __slots__ = (
        "_distances",
        "_first_key",
        "_row",
        "_segment",
        "_slopes",
        "_spec",
        "_window",
        "gather",
        "triangle",
    )

    def __init__(
        self,
        pool: KVPool,
        segment: Segment,
        row: int,
        spec: AttentionSpec,
        window: int | None,
        dtype: torch.dtype,
    ) -> None:
        f = pool.format
        self._segment = segment
        self._row = row
        self._spec = spec
        self._window = window
        first_block = _first_block(segment, window, pool)
        self._first_key = first_block * f.block_tokens
        table = segment.block_table[first_block : f.blocks_for(segment.end)]
        self.gather = Gather(pool, table[None], dtype)
        size = min(segment.count, QUERY_TILE)
        self.triangle = torch.full((size, size), float("-inf"), dtype=dtype).triu_(1)

    def attend(self, tiles: Tensor, q: Tensor, out: Tensor) -> None:
        """Fill this chunk's rows of ``out [T, Hq * D]`` from its rows of ``q [T, Hq, D]`` float32."""
        spec, segment = self._spec, self._segment
        kv_heads, group, d = spec.num_kv_heads, spec.group, spec.head_dim
        keys, values = self.gather.read(tiles)
        size = max(16, min(QUERY_TILE, MAX_SCORES // (spec.num_heads * (segment.end - self._first_key))))
        for first in range(0, segment.count, size):
            n = min(size, segment.count - first)
            rows = slice(self._row + first, self._row + first + n)
            seen = self._seen(segment.start + first, n)
            queries = q[rows].view(n, kv_heads, group, d).permute(1, 2, 0, 3).to(keys.dtype)
            queries = queries.reshape(kv_heads, group * n, d)
            scores = torch.bmm(queries, keys[:, seen].transpose(1, 2))
            self._bias(scores.view(kv_heads, group, n, -1), segment.start + first)
            mixed = torch.bmm(scores.softmax(-1), values[:, seen]).view(kv_heads, group, n, d)
            out[rows].view(n, kv_heads, group, d).copy_(mixed.permute(2, 0, 1, 3))

    def _seen(self, position: int, n: int) -> slice:
        """The gathered keys that the ``n`` queries from ``position`` on see."""
        oldest = _oldest(position, self._window)
        return slice(oldest - self._first_key, position + n - self._first_key)

    def _bias(self, scores: Tensor, position: int) -> None:
        """Cap, slope and mask ``scores [Hkv, group, n, keys]`` of the queries from ``position`` on, in place."""
        n, width = scores.shape[2:]
        spec, triangle = self._spec, self.triangle[:n, :n]
        if spec.softcap is not None:
            _capped(scores, spec.softcap)
        if spec.alibi_slopes is not None:
            slopes = spec.alibi_slopes.view(spec.num_kv_heads, spec.group, 1, 1).to(scores.dtype)
            # The last key is the last query's own.
            distance = torch.arange(width)[None, :] - torch.arange(width - n, width)[:, None]
            scores.addcmul_(slopes, distance.to(scores.dtype))
        scores[..., width - n :].add_(triangle)
        if self._window is not None:
            # Query i loses the i oldest of the keys that a full window before query 0 holds; those before position
            # 0 do not exist.
            absent = max(0, self._window - 1 - position)
            if absent < n:
                scores[..., : n - absent].add_(triangle.t()[:, absent:])


def _capped(scores: Tensor, cap: float) -> Tensor:
    """``cap * tanh(scores / cap)``, in place."""
    return scores.div_(cap).tanh_().mul_(cap)


def _oldest(position: int, window: int | None) -> int:
    """The first position that the token at ``position`` sees."""
    return 0 if window is None else max(0, position - window + 1)


def _first_block(segment: Segment, window: int | None, pool: KVPool) -> int:
    """Index in the segment's table of the first block that its first token sees."""
    return _oldest(segment.start, window) // pool.format.block_tokens


def _rotation(spec: AttentionSpec, rope: RopeTable, positions: Tensor) -> Tensor:
    """Complex factors ``[T, Hq + 2 Hkv, D / 2]``: one multiplication serves q (with the softmax scale folded in), k
    and v (which is not rotated)."""
    angles = rope.rotation(positions).unsqueeze(1)
    heads = spec.num_heads + 2 * spec.num_kv_heads
    rotation = torch.ones(len(positions), heads, spec.head_dim // 2, dtype=torch.complex64, device=positions.device)
    rotation[:, : spec.num_heads] = angles * spec.scale
    rotation[:, spec.num_heads : spec.num_heads + spec.num_kv_heads] = angles
    return rotation


def _normalise(heads: Tensor, spec: AttentionSpec, norm: QKNorm) -> Tensor:
    """RMSNorm of the q and k heads of ``heads [T, Hq + 2 Hkv, D]`` float32; v passes through."""
    hq, hk = spec.num_heads, spec.num_kv_heads
    square: Tensor = torch.linalg.vector_norm(heads, 2, -1, True).square_()
    scale = square.mul_(1.0 / spec.head_dim).add_(norm.eps).rsqrt_()
    scale[:, hq + hk :] = 1.0
    normed = heads * scale
    normed[:, :hq] *= norm.q_weight
    normed[:, hq : hq + hk] *= norm.k_weight
    return normed


def _padded(table: Tensor, width: int) -> Tensor:
    if table.shape[0] == width:
        return table
    return torch.cat((table, table[-1:].expand(width - table.shape[0])))


def _zero_begun_blocks(pool: KVPool, segments: Sequence[Segment]) -> None:
    """Zero each block that this step begins without filling it, whatever an earlier owner left in it."""
    block_tokens = pool.format.block_tokens
    begun = [
        segment.block_table[segment.end // block_tokens]
        for segment in segments
        if segment.end % block_tokens and segment.end // block_tokens * block_tokens >= segment.start
    ]
    if begun:
        pool.storage.index_fill_(0, torch.stack(begun), 0)


def _group_by_length(singles: list[_Single], block_tokens: int) -> list[list[_Single]]:
    """Split rows so that one long row doesn't make all others pay; within a group the order of rows is kept."""
    groups: list[list[_Single]] = []
    waste = widest = 0

    def held(single: _Single) -> int:
        return -(-single.segment.end // block_tokens) - single.first_block

    for single in sorted(singles, key=lambda single: -held(single)):
        blocks = held(single)
        waste += widest - blocks
        if not groups or waste > PADDED_BLOCKS:
            groups.append([])
            waste, widest = 0, blocks
        groups[-1].append(single)
    return [sorted(group, key=lambda single: single.row) for group in groups]
