"""``quantization_config`` of ``config.json``: which of the known writers' layouts it describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from firsttoken.checkpoint.json_files import JSONObject
from firsttoken.checkpoint.quantized.awq import read_awq
from firsttoken.checkpoint.quantized.compressed import read_compressed
from firsttoken.checkpoint.quantized.fp8 import read_fp8
from firsttoken.checkpoint.quantized.gptq import read_gptq
from firsttoken.checkpoint.quantized.scheme import QuantScheme
from firsttoken.checkpoint.quantized.targets import TargetScheme

_READERS: dict[str, Callable[[JSONObject], TargetScheme]] = {
    "compressed-tensors": read_compressed,
    "gptq": read_gptq,
    "awq": read_awq,
    "fp8": read_fp8,
}
# The second is how compressed-tensors spelt it at first.
_KEYS = ("quantization_config", "compression_config")


def read_scheme(config: JSONObject, linears: Iterable[str]) -> QuantScheme | None:
    """How each of ``linears``, the model's, is stored; None for weights in full. Raises `CheckpointError` with key and
    value for what would not be honoured."""
    for key in _KEYS:
        found = config.object(key)
        if found is None:
            continue
        method = found.text("quant_method")
        if method not in _READERS:
            raise found.fail(
                "quant_method",
                f"{method!r:.80} is not supported, only {', '.join(_READERS)} are: use the unquantized model or a "
                "GGUF file",
            )
        said = _READERS[method](found)
        return QuantScheme(method=method, linears=dict(said.resolve(found, linears)))
    return None
