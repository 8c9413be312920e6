"""firsttoken: an LLM inference engine and OpenAI-compatible server whose one promise is latency.

The public Python API is imported lazily, so that `import firsttoken` stays torch-free and takes milliseconds::

    from firsttoken import LLM, SamplingParams
    LLM("smollm2").generate(["The capital of France is"], SamplingParams(temperature=0))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from firsttoken.version import __version__

if TYPE_CHECKING:
    from firsttoken.core.engine_args import EngineArgs
    from firsttoken.core.outputs import CompletionOutput, RequestOutput
    from firsttoken.core.pooling import PoolingParams
    from firsttoken.core.sampling_params import SamplingParams
    from firsttoken.core.structured_outputs import StructuredOutputsParams
    from firsttoken.frontend.async_llm import AsyncEngineArgs, AsyncLLM, AsyncLLMEngine
    from firsttoken.frontend.llm import LLM

_LAZY = {
    "LLM": "firsttoken.frontend.llm",
    "AsyncLLM": "firsttoken.frontend.async_llm",
    "AsyncLLMEngine": "firsttoken.frontend.async_llm",
    "AsyncEngineArgs": "firsttoken.frontend.async_llm",
    "EngineArgs": "firsttoken.core.engine_args",
    "PoolingParams": "firsttoken.core.pooling",
    "SamplingParams": "firsttoken.core.sampling_params",
    "StructuredOutputsParams": "firsttoken.core.structured_outputs",
    "RequestOutput": "firsttoken.core.outputs",
    "CompletionOutput": "firsttoken.core.outputs",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'firsttoken' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
