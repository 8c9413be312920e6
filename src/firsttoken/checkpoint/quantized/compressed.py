"""compressed-tensors, as llm-compressor and `firsttoken quantize` write it."""

from __future__ import annotations

from firsttoken.checkpoint.json_files import JSONObject
from firsttoken.checkpoint.quantized.scheme import Format, Layout, LinearScheme
from firsttoken.checkpoint.quantized.targets import Targets, TargetScheme, read_targets

_LAYOUTS: dict[str, Layout] = {
    "pack-quantized": "words",
    "int-quantized": "plain",
    "float-quantized": "plain",
    "naive-quantized": "plain",
}
_MIXED = "mixed-precision"  # each group says its own
_FORMATS: dict[tuple[str, int], Format] = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "fp8"}
# Int4 kernels apply a scale to so many columns or a multiple.
INT4_COLUMNS = 32


def read_compressed(config: JSONObject) -> TargetScheme:
    """Raises `CheckpointError` for what would not be honoured. Activations are computed in more bits than asked for,
    so what is said of inputs may be left aside."""
    if "kv_cache_scheme" in config:
        raise config.fail(
            "kv_cache_scheme", f"is {config.get('kv_cache_scheme')!r:.80}: a file's own scales of KV are not supported"
        )
    _refuse_sparse(config)
    for key in ("transform_config", "moe_sparsity_config"):
        if config.get(key):
            raise config.fail(key, f"is {config.get(key)!r:.80}, which is not supported")
    groups = config.object("config_groups")
    if groups is None or not groups.values:
        raise config.fail("config_groups", "is missing: it says which linears are quantized and how")
    layout = config.text("format")
    return TargetScheme(
        tuple(_group(groups, name, layout) for name in groups.values), read_targets(config, "ignore", strict=False)
    )


def _refuse_sparse(config: JSONObject) -> None:
    sparsity = config.object("sparsity_config")
    if sparsity is not None and sparsity.values and sparsity.text("format", "dense") != "dense":
        raise sparsity.fail("format", f"{sparsity.get('format')!r:.80} is not supported: sparse weights are not read")


def _group(groups: JSONObject, name: str, layout: str) -> tuple[Targets, LinearScheme]:
    if isinstance(groups.get(name), list):
        raise groups.fail(name, "is a preset by name, which is not supported: write the scheme out")
    group = groups.object(name)
    assert group is not None or name in groups.values
    weights = None if group is None else group.object("weights")
    if group is None or weights is None:
        raise groups.fail(name, "says nothing of weights: files that only quantize activations are not supported")
    if "output_activations" in group:
        raise group.fail("output_activations", "is not supported: results of linears stay as they are")
    inputs = group.object("input_activations")
    if inputs is not None and inputs.integer("num_bits", 8) < 8:
        raise inputs.fail(
            "num_bits", f"is {inputs.get('num_bits')}: activations of fewer than 8 bits are not supported"
        )
    return read_targets(group, "targets"), _scheme(weights, group, layout)


def _scheme(weights: JSONObject, group: JSONObject, layout: str) -> LinearScheme:
    if layout == _MIXED or "format" in group:
        layout = group.text("format")
    if layout not in _LAYOUTS:
        raise group.fail("format", f"{layout!r:.80} is not supported, only {', '.join(_LAYOUTS)} are")
    kind = (weights.text("type", "int"), weights.integer("num_bits", 8))
    format = _FORMATS.get(kind)
    if format is None or (format == "fp8" and layout == "pack-quantized"):
        raise weights.fail("num_bits", f"{kind[1]} of type {kind[0]!r:.80} in {layout} are not supported")
    if weights.get("dynamic"):
        raise weights.fail("dynamic", f"is {weights.get('dynamic')!r:.80}: weights are rounded beforehand")
    order = weights.get("actorder")
    if order not in (None, False, "weight", "static"):
        raise weights.fail("actorder", f"is {order!r:.80}: {REGROUP}")
    symmetric = weights.flag("symmetric", True)
    if format == "fp8" and not symmetric:
        raise weights.fail("symmetric", "is false: FP8 has no zero points")
    return LinearScheme(format, _columns(weights, format), not symmetric, _LAYOUTS[layout])


def _columns(weights: JSONObject, format: Format) -> int:
    """The columns that share a scale, 0 for all of a row."""
    size = weights.optional_integer("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.text("strategy", inferred)
    if strategy in ("tensor", "channel"):
        return 0
    if strategy != "group" or format == "fp8":
        raise weights.fail("strategy", f"{strategy!r:.80} of {format} weights is not supported")
    return check_group(weights, weights.integer("group_size"), format)


# ------------------------------------------------------------------- for all writers

REGROUP = (
    "columns whose groups are mixed by activation order are not supported: quantize with groups that are fixed before "
    "(actorder 'weight' or 'static', static_groups, desc_act false)"
)


def check_group(config: JSONObject, size: int, format: Format, key: str = "group_size") -> int:
    """``size`` if kernels can have it, 0 for -1. Raises `CheckpointError`."""
    if size == -1:
        return 0
    if size <= 0 or (format == "int4" and size % INT4_COLUMNS):
        raise config.fail(key, f"is {size}: -1 or a multiple of {INT4_COLUMNS} is supported")
    return size
