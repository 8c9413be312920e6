"""What an executor with graphs takes of a GPU beside weights and KV: its rows, steps and captured steps. Torch-free.

A step's peak is the sum of the tensors that are alive at once in `models.fused` (a test compares it with the tensors of
a real step on torch's meta device); of other families it is an estimate. What the allocator makes of a sequence of
steps is a model: a tensor that no free segment holds takes a new one, and smaller ones share what is there.
"""

from __future__ import annotations

from dataclasses import dataclass

from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.executor.config import ExecutorConfig
from firsttoken.executor.graphs.profiles import ShapeTable, StepShape
from firsttoken.executor.memory_plan.reading import reading_bytes
from firsttoken.executor.memory_plan.weights import FUSED, ROUNDED_BITS, WeightPlan
from firsttoken.kernels.linear.config import BUCKET_ROWS, MAX_ROWS, LinearConfig, OpKind
from firsttoken.kernels.packed_linear.config import FEW_ROWS, ROOM_ROWS, SHARED_FLOATS
from firsttoken.kernels.tuning import linear_config, product_config

# Steps of more tokens get no graph (`executor.graphs.captures.LARGEST_LEARNED`, which a test compares).
LARGEST_CAPTURED = 2048
# Bytes of a slot's parameters, and of its list of edits.
_SLOT_BYTES, _EDIT_BYTES = 128, 64 * 8
# What torch gives cuBLAS for a stream on Hopper.
_CUBLAS_BYTES = 32 << 20
# Words a row that come back to the host.
_RESULT_WORDS = 44
_TILE, _CHUNK, _LISTED, _LEVELS = 256, 2048, 8192, 16


@dataclass(frozen=True)
class GPUWork:
    """Bytes: ``rows`` for requests and sampling, ``steps`` for the largest step that is launched by kernels, or reads
    prompts (or what loading left for it), ``graphs`` for the captured ones."""

    rows: int
    steps: int
    graphs: int


@dataclass(frozen=True)
class _Widths:
    """Elements a token row of what a layer computes."""

    hidden: int
    query: int
    qkv: int
    inner: int

    @classmethod
    def of(cls, config: ModelConfig) -> _Widths:
        query = config.num_heads * config.head_dim
        kv = 2 * config.num_kv_heads * config.head_dim
        return cls(config.hidden_size, query, query + kv, config.intermediate_size)


def plan_gpu_work(
    config: ExecutorConfig, model: ModelConfig, weights: WeightPlan, gpu: str, sms: int, largest_step: int
) -> GPUWork:
    """For the GPU that its driver calls ``gpu``; ``largest_step`` is the most tokens of prompts that a step will have,
    at most ``config.max_step_tokens``."""
    table = ShapeTable(config.max_num_seqs, config.max_step_tokens, tile_rows(model.head_dim))
    steps = StepSizes(model, gpu, config.quantization)
    most = table.shape(0, [min(largest_step, table.sizes.chunks[-1])], 1)
    # What loading the largest projection leaves free: its parts and their copies, in whatever pieces the allocator had
    # (measured: 1.2 to 2.5 times its size), and what it is rounded from.
    loading = (3 if config.quantization in ROUNDED_BITS else 2) * weights.largest
    idle = loading + _rehearsed(table, steps, loading)
    reading = reading_bytes(model, most.tokens, element=2, on_cpu=False)
    work = max(idle, steps.live(most), steps.live(table.decode_shapes()[-1]), reading)
    return GPUWork(
        rows=_rows(config, model, table) + _workspaces(config, model, gpu, sms) + _CUBLAS_BYTES,
        steps=work,
        graphs=_graphs(table, steps),
    )


def tile_rows(head_dim: int) -> int:
    """Query rows of an attention tile (`kernels.paged_attention.gpu_config.prefill_config`, which a test compares)."""
    return 64 if 64 < head_dim <= 128 else 128


class StepSizes:
    """Bytes of a step's tensors, for a model on a GPU."""

    def __init__(self, model: ModelConfig, gpu: str, quantization: str = "none") -> None:
        self._model = model
        self._gpu = gpu
        self._rounded = quantization if quantization in ROUNDED_BITS else None
        self._widths = _Widths.of(model)
        self._fused = model.architecture in FUSED

    def live(self, shape: StepShape) -> int:
        """The most that is alive at once."""
        if not self._fused:
            return self._composed(shape)
        if self._rounded:
            return self._few(shape) if shape.tokens <= FEW_ROWS[self._rounded] else self._many_rounded(shape)
        return self._few(shape) if shape.tokens <= MAX_ROWS else self._many(shape)

    def largest(self, shape: StepShape) -> int:
        """The largest tensor."""
        inner = 2 * shape.tokens * (1 if self._rounded else 2) * self._widths.inner
        return max(inner, self.logits(shape))

    def logits(self, shape: StepShape) -> int:
        return 4 * shape.samples * self._model.vocab_size

    def _few(self, shape: StepShape) -> int:
        w, rows = self._widths, shape.tokens
        stream = rows * (4 * w.hidden + 4 * self._tiles("residual", w.hidden, w.inner, rows))
        layer = 2 * rows * max(2 * w.qkv + w.query, w.qkv + 2 * w.query, w.qkv + w.query + w.inner)
        return stream + max(layer, 2 * rows * (w.qkv + w.query) + self._head(shape))

    def _many(self, shape: StepShape) -> int:
        w, rows = self._widths, shape.tokens
        stream = 4 * rows * w.hidden
        attend, mlp = 2 * w.query + w.qkv, w.query + 3 * w.inner
        picked = 2 * shape.samples * (2 * w.hidden + w.query)
        end = picked + max(6 * shape.samples * w.inner, self._head(shape))
        # The rows of all tokens are held by nobody once those that sample are picked, but for the heads'.
        return max(stream + 2 * rows * max(attend, mlp), end)

    def _many_rounded(self, shape: StepShape) -> int:
        """Rows go into products as FP8, with their scales and the sums of groups; gates are applied in the product."""
        w, rows = self._widths, shape.tokens
        from_hidden, from_query, from_inner = (self._as_fp8(rows, width) for width in (w.hidden, w.query, w.inner))
        attend = max(from_hidden + 2 * rows * w.qkv, 2 * rows * (w.qkv + w.query), 2 * rows * w.query + from_query)
        mlp = 2 * rows * (w.query + w.inner) + max(from_hidden, from_inner)
        picked = 2 * shape.samples * (2 * w.hidden + w.query)
        return max(2 * rows * w.hidden + max(attend, mlp), picked + self._head(shape))

    def _as_fp8(self, rows: int, width: int) -> int:
        """Bytes of rows of that width."""
        if self._rounded != "int4":
            return rows * (width + 4)
        return -(-rows // ROOM_ROWS) * ROOM_ROWS * width + 4 * rows * (1 + width // 128)

    def _head(self, shape: StepShape) -> int:
        """Logits, and the best of each tile where the small product makes them."""
        if shape.samples > MAX_ROWS and not self._rounded:
            return self.logits(shape)
        tiles = self._tiles("head", self._model.vocab_size, self._widths.hidden, shape.samples) if shape.samples else 0
        return self.logits(shape) + 8 * shape.samples * tiles

    def _composed(self, shape: StepShape) -> int:
        """Block by block: a float32 residual, its norm, and what a projection takes and gives."""
        w, rows = self._widths, shape.tokens
        layer = 4 * w.hidden + 2 * w.hidden + max(4 * w.hidden, 2 * (w.qkv + 2 * w.query), 2 * 3 * w.inner)
        # The head's product in bfloat16, then in float32, twice where logits are capped or refined.
        return rows * layer + 3 * self.logits(shape)

    def _tiles(self, kind: OpKind, n: int, k: int, rows: int) -> int:
        format = "bfloat16" if self._rounded is None else "fp8" if kind == "head" else self._rounded
        return product_config(kind, n, k, min(rows, MAX_ROWS), format, self._gpu).tiles(n)


def _rehearsed(table: ShapeTable, steps: StepSizes, free: int) -> int:
    """What an idle engine adds to the ``free`` bytes that loading left, as it launches each step that it will capture,
    by rising sizes: a step that those have no room for, half of them in pieces that are too small, takes a segment."""
    rising = table.prompt_shapes(LARGEST_CAPTURED)
    return sum(steps.largest(shape) for shape in rising if steps.live(shape) > free // 2)


def _graphs(table: ShapeTable, steps: StepSizes) -> int:
    """The pool that all graphs share, filled by rising sizes, and the logits that graphs of the model alone keep."""
    kept = sum(steps.logits(shape) for shape in table.decode_shapes())
    rising = [*table.decode_shapes(), *table.prompt_shapes(LARGEST_CAPTURED)]
    segments, held = 0, 0
    for shape in sorted(rising, key=steps.largest):
        largest = steps.largest(shape)
        if largest > held:
            segments, held = segments + largest, largest
    widest = max(rising, key=steps.live)
    return kept + max(segments, steps.live(widest))


def _rows(config: ExecutorConfig, model: ModelConfig, table: ShapeTable) -> int:
    """What is made once for requests, inputs, sampling and results."""
    slots, vocab, most = config.max_num_seqs, model.vocab_size, table.largest()
    tables = 4 * slots * (config.max_model_len + 1 + -(-config.max_model_len // config.kv_format.block_tokens))
    tiles, chunks = -(-vocab // _TILE), -(-vocab // _CHUNK)
    scratch = most.samples * (8 * tiles + chunks * (4 * _LEVELS + 8) + 4 * _LISTED + 64 + 24)
    inputs = 4 * (2 * most.tokens + 3 * slots + 5 * most.tiles + 3 * most.samples + 7 * 16)
    results = 4 * _RESULT_WORDS * -(-most.samples // 16) * 16
    return tables + slots * (_SLOT_BYTES + _EDIT_BYTES) + scratch + inputs + results


def _workspaces(config: ExecutorConfig, model: ModelConfig, gpu: str, sms: int) -> int:
    """Tables of angles, and where programs that share a row or a product meet."""
    ropes = 0 if model.rope is None else 1 if model.local_rope is None else 2
    angles = ropes * config.max_model_len * model.head_dim * 4
    cells = max(2 * config.max_num_seqs, -(-4 * sms // model.num_kv_heads), 33 * 4)
    attention = 4 * cells * model.num_heads * (model.head_dim + 1)
    w = _Widths.of(model)
    products: list[tuple[OpKind, int, int]] = [
        ("plain", w.qkv, w.hidden),
        ("residual", w.hidden, w.query),
        ("gated", 2 * w.inner, w.hidden),
        ("residual", w.hidden, w.inner),
        ("head", model.vocab_size, w.hidden),
    ]
    floats = max(_floats(kind, n, k, rows, gpu) for kind, n, k in products for rows in BUCKET_ROWS.values())
    packed = config.quantization in ROUNDED_BITS or model.quantized is not None
    many = 4 * SHARED_FLOATS if packed else 0
    return angles + attention + (4 * floats + many if model.architecture in FUSED else 0)


def _floats(kind: OpKind, n: int, k: int, rows: int, gpu: str) -> int:
    found: LinearConfig = linear_config(kind, n, k, rows, gpu)
    return found.workspace_floats(n)
