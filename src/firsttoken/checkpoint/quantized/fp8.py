"""FP8 with one scale for each matrix, as AutoFP8 and vLLM write it."""

from __future__ import annotations

from firsttoken.checkpoint.json_files import JSONObject
from firsttoken.checkpoint.quantized.compressed import names
from firsttoken.checkpoint.quantized.scheme import LinearScheme, QuantScheme, SchemeGroup


def read_fp8(config: JSONObject) -> QuantScheme:
    """Raises `CheckpointError` for what would not be honoured. Activations are computed in more bits than asked for."""
    for key in ("weight_block_size", "kv_cache_scheme"):
        if config.get(key):
            raise config.fail(key, f"is {config.get(key)!r:.80}, which is not supported")
    scheme = LinearScheme("fp8", 0, False, "plain")
    return QuantScheme(
        method="fp8", groups=(SchemeGroup((r"re:model\.layers\.",), scheme),), ignore=names(config, "ignored_layers")
    )
