"""What a step should take by a device's data sheet: where a model of step times begins that learns the rest."""

from __future__ import annotations

from typing import NamedTuple

from firsttoken.core.step_sizes import StepSizes
from firsttoken.scheduler.step_time import FittedStepTime

# Between the sizes where reading weights decides and those where arithmetic does, both cost something: a p-norm of the
# two with this power is within 20 % of the products measured on an H200 from 1 to 8,192 rows.
BEND = 3
ROWS = (1, 16, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
# Attention gets this share of the arithmetic that products get.
ATTENTION_SHARE = 0.7


class Roof(NamedTuple):
    """What programs get of a device: GB/s of reading, TFLOP/s of products, and the ns in which a layer's attention
    walks along one key."""

    read_gb_s: float
    tflops: float
    key_ns: float = 0.0


class ModelCost(NamedTuple):
    """``weight_bytes`` read by each step, ``parameters`` that each token meets, bytes of KV of a token in all
    ``layers``, and ``attention_width``: query heads x head size."""

    weight_bytes: float
    parameters: float
    kv_bytes: float
    layers: int
    attention_width: int


def rough_step_time(roof: Roof, cost: ModelCost, sizes: StepSizes) -> FittedStepTime:
    """The time of a step of which nothing was measured yet."""
    read_ms = cost.weight_bytes / roof.read_gb_s / 1e6
    row_ms = 2 * cost.parameters / roof.tflops / 1e9
    knots = tuple((rows, float((read_ms**BEND + (row_ms * rows) ** BEND) ** (1 / BEND))) for rows in ROWS)
    pair_flops = 4 * cost.layers * cost.attention_width
    return FittedStepTime(
        sizes,
        knots,
        per_context=cost.kv_bytes / roof.read_gb_s / 1e6,
        per_pair=pair_flops / (ATTENTION_SHARE * roof.tflops) / 1e9,
        per_reach=cost.layers * roof.key_ns / 1e6,
    )
