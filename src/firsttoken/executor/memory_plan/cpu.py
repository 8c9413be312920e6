"""What an engine on the CPU has resident at its peak: while it loads, and while it serves. Torch-free.

A process gives pages back only in large pieces, so of what loading took for a moment a part stays. That part, and what
the engine itself and each prepared product take, are measured: the first as a constant below, the others on the machine
at hand (`bench.footprint`).
"""

from __future__ import annotations

from dataclasses import dataclass

from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.executor.config import ExecutorConfig
from firsttoken.executor.memory_plan.reading import reading_bytes
from firsttoken.executor.memory_plan.weights import CPU_ROUNDED_BITS, ELEMENT_BYTES, WeightPlan

# From this size on the C library takes an allocation from the system, and gives it back.
MAPPED_BYTES = 32 << 20
# Of the layers' smaller matrices: so much more stays resident, in gaps between them (`benchmarks/plan.py`).
GAPS = 0.15
# Kinds of products in a layer: q, k and v, output, gate and up, down. Each is prepared for a number of rows by itself.
PRODUCTS = 4
# Elements that are rounded at a time while a model is loaded (`quantization.on_load`, which a test compares).
ROUNDED_AT_ONCE = 1 << 22
# Attention's queries of a tile, and the bound on its scores (`kernels.paged_attention.cpu`, which a test compares).
# Each tile has a context of its own to be prepared for: two products, where a number of rows has six.
QUERY_TILE, MAX_SCORES = 128, 1 << 24
_TILES_A_LENGTH = 3
# Scores of a tile and their softmax; and the gaps that those of tiles before, always a little shorter, have left: one
# more for so many tiles, up to a number (measured).
_SCORES, _SCORES_A_TILE, _MOST_SCORES = 2, 1 / 8, 7


@dataclass(frozen=True)
class Footprint:
    """Bytes, measured: ``engine``, the peak of one that has next to no model and has run a prompt and an answer;
    ``length``, what a number of token rows that is new to it adds."""

    engine: int
    length: int


@dataclass(frozen=True)
class CPUWork:
    """Bytes. ``loading`` is the peak before the first step, all included; ``gaps`` and ``prepared`` stay, ``step`` and
    ``attention`` are the largest step's own: the first takes what is left in gaps, the second is too large for them."""

    loading: int
    gaps: int
    prepared: int
    step: int
    attention: int


def plan_cpu_work(
    config: ExecutorConfig, model: ModelConfig, weights: WeightPlan, footprint: Footprint, most_prepared: int
) -> CPUWork:
    """``most_prepared``: so many products are kept prepared. With one request at a time of one length there are two
    numbers of rows, that of a whole chunk and that of the rest; with several, as many as can be kept."""
    small = weights.largest < MAPPED_BYTES
    gaps = int(GAPS * weights.layers) if small else int(GAPS * _small_share(model) * weights.layers)
    loading = footprint.engine + weights.kept + weights.source + weights.mapped + gaps
    if not small:
        loading += 3 * weights.largest  # the parts, joined, in the type of the products: each a copy
    loading += _rounding(config, model, weights)
    most = most_prepared // PRODUCTS
    tiles = -(-config.max_model_len // QUERY_TILE)
    lengths = most if config.max_num_seqs > 1 else min(2 + tiles / _TILES_A_LENGTH, most)
    return CPUWork(
        loading=loading,
        gaps=gaps,
        prepared=int(lengths * footprint.length),
        step=_step(config, model),
        attention=_attention(config, model),
    )


def _rounding(config: ExecutorConfig, model: ModelConfig, weights: WeightPlan) -> int:
    """Float32 that is held while a piece of a matrix is rounded: three times for the int8 of a head, six for int4."""
    if config.quantization not in CPU_ROUNDED_BITS:
        return 0
    head = min(model.vocab_size * model.hidden_size, ROUNDED_AT_ONCE)
    layer = min(weights.largest // ELEMENT_BYTES[config.dtype], ROUNDED_AT_ONCE)
    return 4 * max(3 * head, (6 if config.quantization == "int4" else 3) * layer)


def _small_share(model: ModelConfig) -> float:
    """Of a layer's parameters, those of attention: where the MLP's matrices are large, these may still be small."""
    attention = 2 * model.hidden_size * model.head_dim * (model.num_heads + model.num_kv_heads)
    return attention / (attention + 3 * model.hidden_size * model.intermediate_size)


def _step(config: ExecutorConfig, model: ModelConfig) -> int:
    """A whole chunk: residual and norm, and what attention or the MLP hold beside them; and the logits. Where that is
    more, what reading it as a prompt takes."""
    element = ELEMENT_BYTES[config.dtype]
    rows = min(config.max_step_tokens, config.max_model_len * config.max_num_seqs)
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = element * (2 * (query + 2 * kv) + query) + 4 * query
    layer = (4 + element) * model.hidden_size + max(attention, 3 * element * model.intermediate_size)
    reading = reading_bytes(model, rows, element=element, on_cpu=True)
    return max(rows * layer + 2 * 4 * config.max_num_seqs * model.vocab_size, reading)


def _attention(config: ExecutorConfig, model: ModelConfig) -> int:
    """K and V of a layer's whole contexts side by side, and the scores of a tile."""
    element, context = ELEMENT_BYTES[config.dtype], config.max_model_len
    gathered = 2 * model.num_kv_heads * model.head_dim * context * config.max_num_seqs
    # What is rounded is gathered as it is kept, then brought to the products' type a part at a time.
    rounded = 3 * gathered if config.kv_format.rounded else 0
    scores = min(model.num_heads * min(QUERY_TILE, context) * context, MAX_SCORES)
    times = min(_SCORES + -(-context // QUERY_TILE) * _SCORES_A_TILE, _MOST_SCORES)
    return int(element * (gathered + times * scores)) + rounded
