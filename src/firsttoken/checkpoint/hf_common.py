"""Keys of ``config.json`` that mean the same whatever the architecture."""

from __future__ import annotations

from firsttoken.checkpoint.json_files import JSONObject

_DTYPES = frozenset({"float32", "float16", "bfloat16"})


def refuse_quantized(config: JSONObject) -> None:
    """Raise `CheckpointError` for weights in a quantized format."""
    for key in ("quantization_config", "compression_config"):
        scheme = config.object(key)
        if scheme is not None:
            method = scheme.get("quant_method") or "unnamed"
            raise config.fail(
                key,
                f"weights quantized by {method!r:.80} are not supported for this architecture: use those in full",
            )


def read_dtype(config: JSONObject) -> str:
    """The type of the stored weights; raises `CheckpointError` for one that is not supported."""
    dtype = config.text("dtype", config.text("torch_dtype", "float32")).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise config.fail("dtype", f"{dtype!r:.80} is not supported; supported are {', '.join(sorted(_DTYPES))}")
    return dtype
