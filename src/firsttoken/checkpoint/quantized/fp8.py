"""FP8 with one scale for each matrix, as AutoFP8 and vLLM write it."""

from __future__ import annotations

import msgspec

from firsttoken.checkpoint.json_files import JSONObject
from firsttoken.checkpoint.quantized.scheme import LinearScheme
from firsttoken.checkpoint.quantized.targets import ALL, HEAD, TargetScheme, read_targets


def read_fp8(config: JSONObject) -> TargetScheme:
    """Raises `CheckpointError` for what would not be honoured. Activations are computed in more bits than asked for."""
    for key in ("weight_block_size", "kv_cache_scheme"):
        if config.get(key):
            raise config.fail(key, f"is {config.get(key)!r:.80}, which is not supported")
    scheme = LinearScheme("fp8", 0, False, "plain")
    ignored = read_targets(config, "ignored_layers", strict=False)
    # The head is stored in full whatever is said.
    return TargetScheme(((ALL, scheme),), msgspec.structs.replace(ignored, names=ignored.names | HEAD.names))
