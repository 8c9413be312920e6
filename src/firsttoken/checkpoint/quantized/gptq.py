"""GPTQ, as AutoGPTQ, GPTQModel and optimum write it."""

from __future__ import annotations

from firsttoken.checkpoint.json_files import JSONObject
from firsttoken.checkpoint.quantized.compressed import check_group
from firsttoken.checkpoint.quantized.scheme import Format, Layout, LinearScheme
from firsttoken.checkpoint.quantized.targets import ALL, HEAD, Targets, TargetScheme

_FORMATS: dict[int, Format] = {4: "int4", 8: "int8"}
# By how zero points are stored: less one at first, then as they are.
_LAYOUTS: dict[str, Layout] = {"gptq": "gptq", "gptq_v2": "gptq_v2"}
# Must be unset: they change which tensors there are, or what they mean.
_UNSUPPORTED = ("is_marlin_format", "use_marlin", "dynamic", "modules_in_block_to_quantize", "activation", "rotation")


def read_gptq(config: JSONObject) -> TargetScheme:
    """Raises `CheckpointError` for what would not be honoured. Whether columns are grouped in their own order (with
    ``desc_act``: static groups) is seen in the tensors (`quantized.tensors`)."""
    bits = config.integer("bits")
    if bits not in _FORMATS:
        raise config.fail("bits", f"is {bits}, only 4 and 8 are supported")
    for key in _UNSUPPORTED:
        if config.get(key):
            raise config.fail(key, f"is {config.get(key)!r:.80}, which is not supported")
    layout = config.text("checkpoint_format", config.text("format", "gptq"))
    if layout not in _LAYOUTS:
        raise config.fail("checkpoint_format", f"{layout!r:.80} is not supported, only {', '.join(_LAYOUTS)} are")
    words = config.text("pack_dtype", "int32")
    if words != "int32":
        raise config.fail("pack_dtype", f"{words!r:.80} is not supported, only int32 is")
    group = check_group(config, config.integer("group_size"), _FORMATS[bits])
    # Zero points are stored in either case; symmetric ones must all be the middle, which is seen in the tensors.
    scheme = LinearScheme(_FORMATS[bits], group, not config.flag("sym", False), _LAYOUTS[layout])
    return TargetScheme(((ALL, scheme),), Targets() if config.flag("lm_head", False) else HEAD)
