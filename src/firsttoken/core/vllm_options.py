"""What vLLM's options are called here, or why there is none: for those who bring a command line of theirs.

docs/from-vllm.md has the same for people who read first.
"""

from __future__ import annotations

_ONE_GPU = "one GPU is used"
_NO_LORA = "LoRA is not supported"
_ALWAYS_TOOLS = "tools are on wherever the model's chat template reads them"
_LOGS = "--log-level says what is logged"

# By vLLM's long name without its dashes. Options that mean the same under the same name are not in it.
VLLM_OPTIONS: dict[str, str] = {
    "model": "the model stands without a flag, as in firsttoken serve MODEL",
    "gpu-memory-utilization": "--kv-memory SIZE is what the KV cache may take; left out, by what is free",
    "kv-cache-memory-bytes": "it is --kv-memory here",
    "kv-cache-dtype": "it is --kv-dtype here",
    "swap-space": "KV that is evicted goes to --kv-host-memory SIZE",
    "kv-offloading-size": "KV that is evicted goes to --kv-host-memory SIZE",
    "kv-transfer-config": "KV that is evicted goes to --kv-host-memory SIZE and --kv-disk FOLDER",
    "cpu-offload-gb": "weights are kept where they are computed with; firsttoken plan says what fits",
    "max-num-batched-tokens": "a step's size follows its time; --prefill-tokens and --mixed-prefill-tokens fix it",
    "enable-chunked-prefill": "prompts are always computed in chunks",
    "enable-prefix-caching": "it is on; --no-prefix-caching turns it off",
    "enforce-eager": "graphs are captured in idle moments, and no start waits for them",
    "tensor-parallel-size": _ONE_GPU,
    "pipeline-parallel-size": _ONE_GPU,
    "data-parallel-size": _ONE_GPU,
    "tp": _ONE_GPU,
    "pp": _ONE_GPU,
    "dp": _ONE_GPU,
    "enable-expert-parallel": _ONE_GPU,
    "distributed-executor-backend": _ONE_GPU,
    "enable-lora": _NO_LORA,
    "lora-modules": _NO_LORA,
    "speculative-config": "answers are not speculated",
    "enable-auto-tool-choice": _ALWAYS_TOOLS,
    "tool-call-parser": "it is --tool-parser here, and by itself what the model's chat template says",
    "tokenizer": "the model's own is used",
    "trust-remote-code": "no code that comes with a model is run",
    "guided-decoding-backend": "there is one backend, llguidance",
    "structured-outputs-config": "there is one backend, llguidance",
    "scheduling-policy": "requests go by service class, then by priority: --targets FILE",
    "generation-config": "the model's own is used; requests may say otherwise",
    "override-generation-config": "the model's own is used; requests may say otherwise",
    "task": "every model serves answers and embeddings; --pooling says how vectors are made",
    "runner": "every model serves answers and embeddings; --pooling says how vectors are made",
    "disable-log-requests": _LOGS,
    "enable-log-requests": _LOGS,
    "disable-log-stats": _LOGS,
    "uvicorn-log-level": _LOGS,
    "otlp-traces-endpoint": "it is --otlp-endpoint here, for traces and metrics",
    "ssl-ca-certs": "callers' certificates are not asked for",
    "allowed-origins": "it is --allow-origin URL here, once for each",
    "root-path": "routes begin at /: a proxy before it may take a prefix off",
    "uds": "it listens on --host and --port",
    "api-server-count": "there is one process for HTTP and one for the engine",
}


def vllm_hint(name: str) -> str:
    """The end of a message that refuses the option ``name`` (as a flag or in Python): what to do where it is one of
    vLLM's, else nothing."""
    told = VLLM_OPTIONS.get(name.lstrip("-").replace("_", "-"))
    return f" (vLLM's option: {told})" if told else ""
