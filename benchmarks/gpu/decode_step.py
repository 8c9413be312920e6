"""The model's part of a decode step alone, as the executor captures it: for tuning, and for taking its time apart."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch

from firsttoken.checkpoint.locate import open_checkpoint
from firsttoken.core.kv_format import KVFormat
from firsttoken.executor.graphs.runtime import CUDARuntime
from firsttoken.kernels.linear.config import OpKind, RowBucket, row_bucket
from firsttoken.kernels.linear.small import Workspace
from firsttoken.kernels.packed_linear.layout import PackedWeight
from firsttoken.kernels.paged_attention import KVPool
from firsttoken.kernels.paged_attention.gpu import GPUAttention
from firsttoken.kernels.paged_attention.gpu_config import BalancedConfig, DecodeConfig, decode_config
from firsttoken.kernels.paged_attention.triton_decode import DecodeWorkspace
from firsttoken.kernels.tuning import product_config
from firsttoken.models.fused import AnyConfig, FusedLayer
from firsttoken.models.load_fused import Limits, load_fused
from firsttoken.models.projection import Projection
from firsttoken.models.step_view import StepView

Override = tuple[OpKind, int, int, RowBucket]


class NoAttention:
    """Attention that costs nothing."""

    def __init__(self, heads: torch.Tensor) -> None:
        self._heads = heads

    def attend(self, *_: object) -> torch.Tensor:
        return self._heads


class DecodeStep:
    """``rows`` requests at ``context`` tokens each, random weights and random KV."""

    def __init__(self, model: str, rows: int, context: int, quantization: str = "none") -> None:
        self.runtime = CUDARuntime()
        self.overrides: dict[Override, AnyConfig] = {}
        self._trial: dict[Override, AnyConfig] = {}
        self._attention: DecodeConfig | BalancedConfig | None = None
        self._gpu = torch.cuda.get_device_name()
        checkpoint = open_checkpoint(model)
        config = checkpoint.config
        kv = KVFormat(
            dtype="bfloat16", layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim
        )
        blocks = kv.blocks_for(context + 1)
        device = self.runtime.device
        with torch.inference_mode(), self.runtime.stream():
            pool = KVPool(kv, rows * blocks, device=str(device))
            pool.storage.normal_()
            properties = torch.cuda.get_device_properties(device)
            limits = Limits(
                context + 1, rows, properties.multi_processor_count, self._choose, quantization=quantization
            )
            self.model = load_fused(checkpoint, pool, device, limits)
            self.model.attention._choose_decode = self._choose_attention
            # Enough for any candidate.
            self.model.attention._workspace = DecodeWorkspace.allocate(
                DecodeConfig(splits=32).cells(rows), rows, config.num_heads, kv.kv_heads, kv.head_dim, device
            )
            self.model._workspace = Workspace.allocate(1 << 25, 1 << 16, device)
        self._tokens = self.ints(torch.randint(0, config.vocab_size, (rows, context + 2)))
        self._tables = self.ints(torch.arange(rows * blocks)).view(rows, blocks)
        self._context = context

    def choose(self, kind: OpKind, n: int, k: int, rows: int) -> AnyConfig:
        key = (kind, n, k, row_bucket(rows))
        for configs in (self._trial, self.overrides):
            if key in configs:
                return configs[key]
        weight = self.packed(kind, n, k)
        return product_config(kind, n, k, rows, "bfloat16" if weight is None else weight.format, self._gpu)

    def _choose(self, kind: OpKind, n: int, k: int, rows: int, format: str) -> AnyConfig:
        return self.choose(kind, n, k, rows)

    def packed(self, kind: OpKind, n: int, k: int) -> PackedWeight | None:
        """The weights of that product, where they are packed. While the model is made none are."""
        for projection in self._projections() if hasattr(self, "model") else ():
            weight = projection.weight
            if (projection.kind, *weight.shape) == (kind, n, k) and isinstance(weight, PackedWeight):
                return weight
        return None

    def _projections(self) -> tuple[Projection, ...]:
        return *self.model.layers[0].projections, self.model.head

    def _choose_attention(
        self, rows: int, kv_heads: int, head_dim: int, longest: int, sms: int, rounded: bool
    ) -> DecodeConfig | BalancedConfig:
        return self._attention or decode_config(rows, kv_heads, head_dim, longest, sms, rounded)

    def products(self) -> list[tuple[OpKind, int, int]]:
        """The step's different products, as (kind, n, k)."""
        found = {(p.kind, *p.weight.shape): None for p in self._projections()}
        return list(found)

    def parts(self, rows: int) -> list[int]:
        """Numbers of partial sums that the residual products leave to the norms, as configured now."""
        return sorted({self.choose(*key, rows).tiles(key[1]) for key in self.products() if key[0] == "residual"})

    def ints(self, values: torch.Tensor) -> torch.Tensor:
        """On the device, as steps have their inputs."""
        return values.to(device=self.runtime.device, dtype=torch.int32)

    def view(self, rows: int, *, pdl: bool = True) -> StepView:

        ints = self.ints
        slots = ints(torch.arange(rows))
        none = ints(torch.zeros(0))
        return StepView(
            tokens=self._tokens,
            block_tables=self._tables,
            slots=slots,
            positions=ints(torch.full((rows,), self._context - 1)),
            patches=none.view(0, 3),
            tiles=none.view(0, 5),
            sample_rows=slots,
            sample_slots=slots,
            sample_positions=ints(torch.full((rows,), self._context)),
            decode_rows=rows,
            identity=True,
            pdl=pdl,
        )

    def time(
        self,
        rows: int,
        trial: dict[Override, AnyConfig] | None = None,
        *,
        attention: DecodeConfig | BalancedConfig | None = None,
        pdl: bool = True,
    ) -> float:
        """Milliseconds of one replay, the median of 15; infinity for a config that the hardware refuses."""
        self._trial = trial or {}
        self._attention = attention
        self.model.attention._configs.clear()
        view = self.view(rows, pdl=pdl)
        try:
            return self.replay_ms(lambda: self.model.forward(view))
        except Exception as error:
            print(f"  {trial}: {str(error).splitlines()[0]:.120}", flush=True)
            return float("inf")
        finally:
            self._trial = {}
            self._attention = None

    def without_ms(self, rows: int) -> dict[str, float]:
        """Milliseconds of the step when a part is left out, by part; what it costs is the difference."""
        view, model = self.view(rows), self.model
        heads = torch.zeros((rows, model.config.num_heads * model.config.head_dim), dtype=torch.bfloat16, device="cuda")
        times = {"nothing": self.time(rows)}
        attention = model.attention
        model.attention = cast(GPUAttention, NoAttention(heads))
        times["attention"] = self.replay_ms(lambda: model.forward(view))
        model.attention = attention
        layers = model.layers
        model.layers = [_without_rotation(layer) for layer in layers]
        times["rotation"] = self.replay_ms(lambda: model.forward(view))
        model.layers = layers
        hidden_only = replace(view, sample_rows=view.sample_rows[:0])
        times["head"] = self.replay_ms(lambda: model.forward(hidden_only))
        model.layers = layers[:1]
        times["all layers but one"] = self.replay_ms(lambda: model.forward(view))
        model.layers = layers
        return times

    def replay_ms(self, segment: Callable[[], object], replays: int = 15) -> float:
        """Capture ``segment`` and time its replays."""
        with torch.inference_mode(), self.runtime.stream():
            graph = captured(segment)
            for _ in range(3):
                graph.replay()
            times: list[float] = []
            for _ in range(replays):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
        return statistics.median(times)


def captured(segment: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of ``segment`` on the current stream."""
    segment()
    torch.cuda.current_stream().synchronize()
    # A pool of its own: a shared one ends with its last graph.
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        segment()
    finally:
        graph.capture_end()
    return graph


def _without_rotation(layer: FusedLayer) -> FusedLayer:
    attention = layer.attention
    return replace(layer, attention=replace(attention, spec=replace(attention.spec, rope=None)))
