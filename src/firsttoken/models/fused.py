"""Llama-like decoders on kernels of our own: five a layer for few rows, and what `many_rows` has for more.

The residual stream is bfloat16. Where rows are few (64 with bfloat16 weights, 8 with packed ones), who writes it also
prepares the next norm (`kernels.linear.small`). After the last layer's KV is written only rows that sample go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.kernels.embed.triton import embed
from firsttoken.kernels.linear.config import BUCKET_ROWS, MAX_ROWS, LinearConfig, OpKind
from firsttoken.kernels.linear.small import Norm, Workspace, small_linear
from firsttoken.kernels.packed_linear.config import FEW_ROWS, PackedConfig
from firsttoken.kernels.packed_linear.layout import PackedWeight
from firsttoken.kernels.packed_linear.one_row import fp8_row_linear
from firsttoken.kernels.packed_linear.small import packed_linear
from firsttoken.kernels.paged_attention import AttentionParams
from firsttoken.kernels.paged_attention.gpu import GPUAttention
from firsttoken.kernels.rms_norm.triton import add_rms_norm
from firsttoken.models.many_rows import LibraryProducts, ManyRows, RoundedProducts
from firsttoken.models.projection import Projection
from firsttoken.models.step_view import Kept, Logits, StepView


@dataclass(frozen=True, slots=True, eq=False)
class FusedLayer:
    """One layer; gains are float32 ``[H]``. ``gate_up`` has the rows of gate and up in turn."""

    attention: AttentionParams
    attention_gain: Tensor
    qkv: Projection
    output: Projection
    mlp_gain: Tensor
    gate_up: Projection
    down: Projection

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(slots=True, eq=False)
class _Stream:
    """The residual stream of few rows, prepared for the norm that reads it next."""

    hidden: Tensor  # bf16 [M, H]
    scaled: Tensor  # bf16 [M, H]: hidden * gain
    squares: Tensor  # float32 [M, P]: partial sums of squares of hidden


AnyConfig = LinearConfig | PackedConfig
ChooseLinear = Callable[[OpKind, int, int, int, str], AnyConfig]
"""The config of a product of some kind over weights ``[n, k]`` of some format (bfloat16, int4, fp8) with some rows."""


class FusedDecoder:
    """A `StepModel`. ``attention`` holds the KV pool and everything about positions.

    ``deterministic``: a row's bits depend on no other row. Every product is then the small kernel's under the config of
    `MAX_ROWS` rows, whose sums run in the same order for each row, however many there are; more rows go in pieces.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,
        layers: Sequence[FusedLayer],
        final_gain: Tensor,
        head: Projection,
        attention: GPUAttention,
        choose_linear: ChooseLinear,
        *,
        deterministic: bool = False,
    ) -> None:
        self.deterministic = deterministic
        self.config = config
        self.embedding = embedding
        self.layers = list(layers)
        self.final_gain = final_gain
        self.head = head
        self.attention = attention
        self.vocab_size = config.vocab_size
        self.tile_rows = attention.tile_rows
        self._choose_linear = choose_linear
        self._workspace = self._make_workspace()
        self._many_rows: ManyRows = LibraryProducts(config.rms_norm_eps)
        packed = [p.packed for p in self._layer_projections() if isinstance(p.weight, PackedWeight)]
        if packed:
            self._many_rows = RoundedProducts(self._many_rows, config.rms_norm_eps, packed)
        self._few_rows = min((FEW_ROWS[weight.format] for weight in packed), default=MAX_ROWS)

    @property
    def nbytes(self) -> int:
        layers = sum(projection.nbytes for layer in self.layers for projection in layer.projections)
        weight = self.head.weight
        tied = isinstance(weight, Tensor) and weight.data_ptr() == self.embedding.data_ptr()
        head = 0 if tied else self.head.nbytes
        return self.embedding.nbytes + layers + head

    def forward(self, step: StepView, kept: Kept | None = None) -> Logits | None:
        if self.deterministic or step.slots.shape[0] <= self._few_rows:
            return self._forward_few(step, kept)
        return self._forward_many(step, kept)

    def logits(self, hidden: Tensor) -> Tensor:
        weight = self.head.weight
        if self.deterministic or isinstance(weight, PackedWeight):
            return self._head_few(hidden, None, pdl=False).values
        return self._head_many(hidden, weight)

    # ------------------------------------------------------------------ few rows

    def _forward_few(self, step: StepView, kept: Kept | None) -> Logits | None:
        rows = step.slots.shape[0]
        stream = self._embed_few(step, rows)
        following = [layer.attention_gain for layer in self.layers[1:]] + [self.final_gain]
        for layer, gain in zip(self.layers, following, strict=True):
            qkv = self._plain(layer.qkv, stream, step.pdl)
            heads = self.attention.attend(step, layer.attention, qkv)
            self._finish_few(layer, stream, heads, gain, step.pdl)
        if kept is not None:
            kept.hidden = self._normed(stream.hidden).index_select(0, kept.rows)
        if step.sample_rows.shape[0] == 0:
            return None
        if not step.identity:
            picked = step.sample_rows.long()
            stream = _Stream(*(part.index_select(0, picked) for part in (stream.hidden, stream.scaled, stream.squares)))
        return self._head_few(stream.scaled, self._norm(stream), step.pdl)

    def _embed_few(self, step: StepView, rows: int) -> _Stream:
        hidden = self._new(rows, self.config.hidden_size)
        # As many parts as the last projection of a layer leaves: the first layer then needs no kernel of its own.
        parts = self._config(self.layers[0].down, rows).tiles(self.config.hidden_size)
        stream = _Stream(hidden, self._new(*hidden.shape), self._floats(rows, parts))
        embed(
            step.tokens,
            step.slots,
            step.positions,
            self.embedding,
            hidden,
            scaled=stream.scaled,
            ssq=stream.squares,
            gain=self.layers[0].attention_gain,
            pdl=step.pdl,
        )
        return stream

    def _plain(self, projection: Projection, stream: _Stream, pdl: bool) -> Tensor:
        out = self._new(stream.hidden.shape[0], projection.weight.shape[0])
        self._linear(projection, stream.scaled, out, pdl, norm=self._norm(stream))
        return out

    def _finish_few(self, layer: FusedLayer, stream: _Stream, heads: Tensor, gain: Tensor, pdl: bool) -> None:
        """Output projection and MLP, added to ``stream``, which is then prepared for the norm with ``gain``."""
        self._add(layer.output, heads, stream, layer.mlp_gain, pdl)
        gated = self._new(heads.shape[0], layer.gate_up.weight.shape[0] // 2)
        self._linear(layer.gate_up, stream.scaled, gated, pdl, norm=self._norm(stream), gated=True)
        self._add(layer.down, gated, stream, gain, pdl)

    def _add(self, projection: Projection, x: Tensor, stream: _Stream, gain: Tensor, pdl: bool) -> None:
        rows = x.shape[0]
        stream.squares = self._floats(rows, self._config(projection, rows).tiles(projection.weight.shape[0]))
        self._linear(projection, x, stream.hidden, pdl, adds=stream, next_gain=gain)

    def _head_few(self, x: Tensor, norm: Norm | None, pdl: bool) -> Logits:
        rows = x.shape[0]
        config = self._config(self.head, rows)
        tiles = config.tiles(self.vocab_size)
        logits = self._floats(rows, self.vocab_size)
        best = self._floats(rows, tiles), torch.empty((rows, tiles), dtype=torch.int32, device=x.device)
        self._linear(self.head, x, logits, pdl, norm=norm, best=best)
        return Logits(logits, best)

    def _linear(
        self,
        projection: Projection,
        x: Tensor,
        out: Tensor,
        pdl: bool,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        adds: _Stream | None = None,
        next_gain: Tensor | None = None,
        best: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """`small_linear` in pieces of at most `MAX_ROWS` rows. ``adds`` is the stream that the product is added to."""
        config = self._config(projection, x.shape[0])
        for begin in range(0, x.shape[0], MAX_ROWS):
            piece = slice(begin, begin + MAX_ROWS)
            self._small(
                projection,
                x[piece],
                out[piece],
                config,
                pdl=pdl,
                bias=projection.bias,
                norm=None if norm is None else norm._replace(squares=norm.squares[piece]),
                gated=gated,
                residual=None if adds is None else adds.hidden[piece],
                next_gain=next_gain,
                scaled_out=None if adds is None else adds.scaled[piece],
                ssq_out=None if adds is None else adds.squares[piece],
                best=None if best is None else (best[0][piece], best[1][piece]),
            )

    def _small(self, projection: Projection, x: Tensor, out: Tensor, config: AnyConfig, **options: Any) -> None:
        weight = projection.weight
        if isinstance(config, PackedConfig):
            assert isinstance(weight, PackedWeight)
            packed_linear(x, weight, out, config=config, **options)
        elif isinstance(weight, PackedWeight):
            fp8_row_linear(x, weight, out, config=config, **options)
        else:
            small_linear(x, weight, out, config=config, workspace=self._workspace, **options)

    def _norm(self, stream: _Stream) -> Norm:
        return Norm(stream.squares, self.config.rms_norm_eps, self.config.hidden_size)

    def _config(self, projection: Projection, rows: int) -> AnyConfig:
        n, k = projection.weight.shape
        rows = MAX_ROWS if self.deterministic else min(rows, MAX_ROWS)
        format = projection.weight.format if isinstance(projection.weight, PackedWeight) else "bfloat16"
        return self._choose_linear(projection.kind, n, k, rows, format)

    # ------------------------------------------------------------------ more rows

    def _forward_many(self, step: StepView, kept: Kept | None) -> Logits | None:
        # No dependent launch: kernels that fill shared memory only wait in each other's way, 0.7 ms at 16 rows of int4.
        hidden = self._new(step.slots.shape[0], self.config.hidden_size)
        embed(step.tokens, step.slots, step.positions, self.embedding, hidden)
        for layer in self.layers[:-1]:
            self._finish_many(layer, hidden, self._attend_many(layer, step, hidden))
        last = self.layers[-1]
        heads = self._attend_many(last, step, hidden)
        if kept is not None:
            # Of all rows, whose number is one of few: the kernels for it are there.
            full = hidden.clone()
            self._finish_many(last, full, heads)
            kept.hidden = self._normed(full).index_select(0, kept.rows)
        if step.sample_rows.shape[0] == 0:
            return None
        if not step.identity:
            picked = step.sample_rows.long()
            hidden, heads = hidden.index_select(0, picked), heads.index_select(0, picked)
        self._finish_many(last, hidden, heads)
        normed = self._normed(hidden)
        weight = self.head.weight
        if len(normed) <= MAX_ROWS or isinstance(weight, PackedWeight):
            return self._head_few(normed, None, pdl=False)
        return Logits(self._head_many(normed, weight), None)

    def _normed(self, hidden: Tensor) -> Tensor:
        normed = self._new(*hidden.shape)
        add_rms_norm(hidden, None, self.final_gain, self.config.rms_norm_eps, normed)
        return normed

    def _attend_many(self, layer: FusedLayer, step: StepView, hidden: Tensor) -> Tensor:
        qkv = self._many_rows.normed(hidden, layer.attention_gain, layer.qkv)
        return self.attention.attend(step, layer.attention, qkv)

    def _finish_many(self, layer: FusedLayer, hidden: Tensor, heads: Tensor) -> None:
        """Add the output projection and the MLP to ``hidden``."""
        self._many_rows.add(hidden, heads, layer.output)
        gated = self._many_rows.normed(hidden, layer.mlp_gain, layer.gate_up)
        self._many_rows.add(hidden, gated, layer.down)

    def _head_many(self, normed: Tensor, weight: Tensor) -> Tensor:
        if normed.is_meta:
            return self._floats(len(normed), len(weight))
        # Float32 results of a bfloat16 product are CUDA's alone; elsewhere a product in float32 is right, if slow.
        if normed.is_cuda:
            return torch.mm(normed, weight.t(), out_dtype=torch.float32)
        return torch.mm(normed.float(), weight.t().float())

    # ------------------------------------------------------------------ memory

    def _layer_projections(self) -> Iterator[Projection]:
        """Of all layers: a file may hold some in full and others rounded."""
        return (projection for layer in self.layers for projection in layer.projections)

    def _new(self, rows: int, columns: int) -> Tensor:
        # Not by empty_like: on the meta device, where kernels are only compiled, it makes torch import its tracer, for
        # a second or more. So do products, which are left out there.
        return torch.empty((rows, columns), dtype=self.embedding.dtype, device=self.embedding.device)

    def _floats(self, rows: int, columns: int) -> Tensor:
        return torch.empty((rows, columns), dtype=torch.float32, device=self.embedding.device)

    def _make_workspace(self) -> Workspace:
        """Room for the projection that needs most, at any number of rows: all kernels share it, one after the other."""
        floats = tiles = 0
        for projection in (*self._layer_projections(), self.head):
            n = projection.weight.shape[0]
            for rows in BUCKET_ROWS.values():
                config = self._config(projection, rows)
                if isinstance(config, PackedConfig):
                    continue  # its programs share nothing
                floats, tiles = max(floats, config.workspace_floats(n)), max(tiles, config.tiles(n))
        return Workspace.allocate(floats, tiles, self.embedding.device)
