"""Bytes of a model's weights as each device keeps them, from the list of its tensors. Torch-free.

What is counted is what `models.load` and `models.load_fused` make: q, k and v are one matrix, gate and up another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from firsttoken.checkpoint.checkpoint import Checkpoint, TensorInfo
from firsttoken.checkpoint.quantized.scheme import LinearScheme
from firsttoken.kernels.packed_linear.config import CHUNK_COLUMNS, TILE, int4_group

# Whose layers the GPU's fused kernels compute (`models.registry.Family.fused`, which a test compares).
FUSED = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
# What GPUs round weights to while they are loaded, or keep as a file has them; and what the CPU does.
ROUNDED_BITS = {"int4": 4, "fp8": 8}
CPU_ROUNDED_BITS = {"int4": 4, "int8": 8}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
_FOUR_BIT = frozenset({"Q4_0", "Q4_1"})
# Whose rows are looked up without a copy in full (`quantization.gguf_torch.TYPES`).
_ROW_TYPES = _FOUR_BIT | {"Q8_0"}
_GROUP = 32
# Rows that the CPU packs together (`quantization.int4.BLOCK`).
_BLOCK = 64
# Multiples of columns that the CPU's 8-bit product takes (`quantization.int8.kernel_takes`).
_STEP = 16
# Matrices that are kept as one.
_TOGETHER = (re.compile(r"self_attn\.[qkv]_proj\.weight$"), re.compile(r"mlp\.(gate|up)_proj\.weight$"))


@dataclass(frozen=True)
class WeightPlan:
    """Bytes. ``kept``: what stays; ``layers`` of them in the layers' matrices; ``largest``: the largest of those, in
    the type that is computed with; ``source``: an embedding that is held beside its copies until all is loaded;
    ``mapped``: the file, as far as it is read through a mapping."""

    kept: int
    layers: int
    largest: int
    source: int
    mapped: int


@dataclass(frozen=True)
class _Matrix:
    """``rounded``: how the file stores it, or how it will be rounded."""

    type: str
    rows: int
    columns: int
    rounded: LinearScheme | None = None

    @property
    def elements(self) -> int:
        return self.rows * self.columns


def plan_weights(checkpoint: Checkpoint, device: str, dtype: str, quantization: str) -> WeightPlan:
    """What loading ``checkpoint`` on ``device`` will keep, with resolved ``dtype`` and ``quantization``."""
    config, random = checkpoint.config, checkpoint.source == "random"
    infos = dict(checkpoint.tensors.infos())
    if config.tie_word_embeddings:
        infos.pop(HEAD, None)
    drawn = "F32" if dtype == "float32" else "BF16"
    matrices = {
        name: _Matrix(drawn if random else info.type, info.shape[0], info.shape[1], info.rounded)
        for name, info in infos.items()
        if _is_matrix(info)
    }
    vectors = sum(info.num_elements for info in infos.values() if not _is_matrix(info))
    embedding = matrices.pop(EMBEDDING)
    head = matrices.pop(HEAD, None)
    joined = _join(matrices)
    element = ELEMENT_BYTES[dtype]
    largest = element * max(matrix.elements for matrix in joined)
    if quantization in ROUNDED_BITS and device != "cpu":
        last = head or embedding
        # The head that was to be rounded on load is FP8; where a file says it is the embedding, there is one of both.
        ends = element * embedding.elements
        if config.quantized is None:
            joined = [replace(matrix, rounded=_on_load(matrix, quantization)) for matrix in joined]
            ends += _rounded_bytes(replace(last, rounded=_on_load(last, "fp8")), element)
        elif head is not None:
            ends += _rounded_bytes(head, element)
        layers = sum(_rounded_bytes(matrix, element) for matrix in joined)
        # Where int4 is FP8 for a product of many rows, in whole blocks of columns.
        four = [matrix for matrix in joined if matrix.rounded and matrix.rounded.format == "int4"]
        scratch = max((matrix.rows * -(-matrix.columns // 64) * 64 for matrix in four), default=0)
        return WeightPlan(4 * vectors + ends + layers + scratch, layers, max(largest, last.elements), 0, 0)
    rule = "as stored" if quantization in CPU_ROUNDED_BITS and config.quantized is not None else quantization
    layers = sum(_linear_bytes(matrix, element, rule) for matrix in joined)
    if device != "cpu" and config.architecture in FUSED:
        ends = element * (embedding.elements + (0 if head is None else head.elements))
    else:
        ends = _ends(embedding, head, element, rule)
    mapped = 0 if random or device != "cpu" else sum(info.nbytes for info in infos.values())
    # Float tensors of a file are views of it; what is drawn takes memory of its own.
    source = element * embedding.elements if random and device == "cpu" else 0
    return WeightPlan(4 * vectors + ends + layers, layers, largest, source, mapped)


def _is_matrix(info: TensorInfo) -> bool:
    return len(info.shape) == 2


def _ends(embedding: _Matrix, head: _Matrix | None, element: int, quantization: str) -> int:
    """The table of rows that tokens are looked up in, the head's matrix, and its own rows for exact logits, which are
    the matrix itself where that is int8."""
    rounded = quantization in CPU_ROUNDED_BITS
    total = _table_bytes(embedding, element)
    last = head or embedding
    total += _linear_bytes(last, element, "int8" if rounded else quantization)
    if quantization == "packed" and last.columns % _STEP == 0:
        total += _linear_bytes(last, element, "int8")  # for few rows
    if head is not None and element == 2 and not rounded:
        total += _table_bytes(head, element)
    return total


def _table_bytes(matrix: _Matrix, element: int) -> int:
    if matrix.type in _FLOATS:
        return matrix.elements * _FLOATS[matrix.type]
    if matrix.type in _ROW_TYPES:
        return matrix.elements // _GROUP * {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[matrix.type]
    if matrix.rounded is not None:
        # A byte a value; scales of two or four, and a byte for a zero point.
        return matrix.elements + matrix.elements // (matrix.rounded.group or matrix.columns) * 5
    return matrix.elements * element


def _linear_bytes(matrix: _Matrix, element: int, quantization: str) -> int:
    """On the CPU: int8 with a scale a row, int4, or in full; and beside that, where weights are packed, what the file
    holds in four bits. "as stored": each as the file holds it."""
    scheme, group = matrix.rounded, _stored_group(matrix)
    rows = scheme is not None and scheme.format == "int8" and scheme.group == 0 and not scheme.zeros
    if quantization == "int8" or (quantization in ("int4", "as stored") and rows):
        return matrix.elements + 2 * matrix.rows
    if quantization == "int4":
        return _int4_bytes(matrix, group or int4_group(matrix.columns) or _GROUP)
    if quantization == "as stored" and group:
        return _int4_bytes(matrix, group)
    return matrix.elements * element + (_int4_bytes(matrix, group) if quantization == "packed" and group else 0)


def _stored_group(matrix: _Matrix) -> int:
    """The columns that share a scale where the file holds four bits (`quantization.int4.packed_as_stored`); else 0."""
    if matrix.type in _FOUR_BIT:
        return _GROUP
    scheme = matrix.rounded
    return int4_group(scheme.group or matrix.columns) if scheme is not None and scheme.format == "int4" else 0


def _int4_bytes(matrix: _Matrix, group: int) -> int:
    """Half a byte an element, with a scale and a zero (bfloat16) for each group, in whole blocks of rows."""
    elements = -(-matrix.rows // _BLOCK) * _BLOCK * matrix.columns
    return elements // 2 + elements // group * 4


def _on_load(matrix: _Matrix, quantization: str) -> LinearScheme:
    """What `quantization.on_load` makes of it."""
    if quantization == "int4":
        return LinearScheme("int4", int4_group(matrix.columns), False, "words")
    return LinearScheme("fp8", 0, False, "plain")


def _rounded_bytes(matrix: _Matrix, element: int) -> int:
    """Values and scales: bfloat16 for each group of int4, and for its zero point, and float32 for each row. In full
    where there are no kernels for what it is."""
    scheme = matrix.rounded
    if scheme is None or scheme.format not in ROUNDED_BITS:
        return element * matrix.elements
    row_scales = 4 * matrix.rows
    if scheme.format == "fp8":
        return matrix.elements + row_scales
    # Whole tiles of rows and chunks of columns.
    chunk = CHUNK_COLUMNS["int4"]
    elements = -(-matrix.rows // TILE) * TILE * -(-matrix.columns // chunk) * chunk
    group = int4_group(scheme.group or matrix.columns) or _GROUP
    return elements // 2 + elements // group * (4 if scheme.zeros else 2) + row_scales


def _join(matrices: Mapping[str, _Matrix]) -> list[_Matrix]:
    """The layers' matrices as they are kept: those of one product below each other."""
    groups: dict[str, list[_Matrix]] = {}
    for name, matrix in matrices.items():
        key = name
        for number, pattern in enumerate(_TOGETHER):
            if pattern.search(name):
                key = f"{pattern.sub('', name)}{number}"
        groups.setdefault(key, []).append(matrix)
    return [_stack(parts) for parts in groups.values()]


def _stack(parts: Iterable[_Matrix]) -> _Matrix:
    """A mixture of types is not packed any more, and one of groups or formats not rounded."""
    parts = list(parts)
    types = {part.type for part in parts}
    schemes = {part.rounded and (part.rounded.format, part.rounded.group) for part in parts}
    rounded = parts[0].rounded if len(schemes) == 1 else None
    if rounded is not None and any(part.rounded and part.rounded.zeros for part in parts):
        rounded = LinearScheme(rounded.format, rounded.group, True, rounded.layout)
    rows = sum(part.rows for part in parts)
    return _Matrix(types.pop() if len(types) == 1 else "F32", rows, parts[0].columns, rounded)
