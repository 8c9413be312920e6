"""One engine of cpu_peers.py, in its own process: reads measures to take from stdin, one JSON object a line.

``{"do": "decode", "batch", "context", "tokens", "seed"}`` -> ``{"tokens_per_s"}``;
``{"do": "first_token", "context", "seed"}`` -> ``{"seconds"}``. The first line out says what runs.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import inspect
import json
import os
import random
import sys
import time
from array import array
from typing import Any, Protocol

Prompt = list[int]


class Engine(Protocol):
    """``info`` goes into the result as it is."""

    info: dict[str, Any]
    vocab_size: int

    def first_token(self, prompt: Prompt) -> float:
        """Seconds from the prompt's token ids to the first output token."""

    def decode(self, prompts: list[Prompt], tokens: int) -> float:
        """Output tokens a second, summed over the prompts, from the first output token to the last."""

    def close(self) -> None: ...


# ---------------------------------------------------------------- firsttoken


class FirstToken:
    """Through `AsyncLLM` with the engine in a process of its own, as when serving."""

    def __init__(self, path: str, threads: int) -> None:
        from firsttoken.core.engine_args import EngineArgs
        from firsttoken.frontend.async_llm import AsyncLLM

        self._runner = asyncio.Runner()
        self._llm = self._runner.run(AsyncLLM.launch(EngineArgs(model=path, device="cpu", threads=threads)))
        info = self._llm.info
        self.vocab_size = info.vocab_size
        self.info = {name: getattr(info, name) for name in ("model", "dtype", "quantization", "kv_dtype")}

    def first_token(self, prompt: Prompt) -> float:
        began = time.perf_counter()
        first, _ = self._runner.run(self._request(prompt, 1))
        return first - began

    def decode(self, prompts: list[Prompt], tokens: int) -> float:
        async def together() -> list[tuple[float, float]]:
            return await asyncio.gather(*(self._request(prompt, tokens + 1) for prompt in prompts))

        times = self._runner.run(together())
        # Between the last first token and the first last one all of them decode.
        return len(prompts) * tokens / (max(last for _, last in times) - max(first for first, _ in times))

    def close(self) -> None:
        self._runner.run(self._llm.shutdown())
        self._runner.close()

    async def _request(self, prompt: Prompt, tokens: int) -> tuple[float, float]:
        from firsttoken.core.sampling_params import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        first = last = 0.0
        async for delta in self._llm.open(array("I", prompt), params):
            last = time.perf_counter()
            if delta.token_ids and not first:
                first = last
        return first, last


# ---------------------------------------------------------------- transformers


class Transformers:
    """`LlamaForCausalLM` filled with the file's dequantised weights, eager, its own cache."""

    def __init__(self, path: str, threads: int, dtype: str) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from firsttoken.checkpoint.dequantize import dequantize
        from firsttoken.checkpoint.locate import open_checkpoint

        torch.set_num_threads(threads)
        self._torch = torch
        checkpoint = open_checkpoint(path)
        config = checkpoint.config
        if config.architecture != "LlamaForCausalLM" or config.rope is None:
            raise SystemExit(f"only Llama models can be filled into transformers here, got {config.architecture}")
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position,
                rms_norm_eps=config.rms_norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
                tie_word_embeddings=config.tie_word_embeddings,
            )
        )
        state = {}
        for name, tensor in checkpoint.tensors.infos().items():
            values = dequantize(checkpoint.tensors.data(name), tensor.type, tensor.shape)
            state[name] = torch.from_numpy(values).reshape(tensor.shape)
        missing, extra = model.load_state_dict(state, strict=False)
        left = set(missing) - ({"lm_head.weight"} if config.tie_word_embeddings else set())
        if left or extra:
            raise SystemExit(f"the weights do not fit transformers' model: missing {sorted(left)}, extra {extra}")
        model.tie_weights()
        self._model = model.to(getattr(torch, dtype)).eval()
        # transformers renamed the cache's argument and output in 5.x.
        names = inspect.signature(LlamaForCausalLM.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in names else "cache"
        self.vocab_size = config.vocab_size
        self.info = {"dtype": dtype}

    def first_token(self, prompt: Prompt) -> float:
        began = time.perf_counter()
        with self._torch.inference_mode():
            self._prefill([prompt])
        return time.perf_counter() - began

    def decode(self, prompts: list[Prompt], tokens: int) -> float:
        with self._torch.inference_mode():
            chosen, cache = self._prefill(prompts)
            began = time.perf_counter()
            for _ in range(tokens):
                out = self._model(input_ids=chosen, use_cache=True, **{self._cache_name: cache})
                chosen = out.logits[:, -1].argmax(-1, keepdim=True)
            int(chosen[0, 0])
        return len(prompts) * tokens / (time.perf_counter() - began)

    def close(self) -> None:
        """Nothing outlives the process."""

    def _prefill(self, prompts: list[Prompt]) -> tuple[Any, Any]:
        ids = self._torch.tensor(prompts)
        out = self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), getattr(out, self._cache_name)


# ---------------------------------------------------------------- llama.cpp


class LlamaCpp:
    """`llama_decode` itself, one batch a step; a context for one sequence and one for eight."""

    BATCH = 512

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._contexts = {sequences: self._context(sequences, threads) for sequences in (1, 8)}
        self._batch = llama_cpp.llama_batch_init(self.BATCH, 0, 1)
        self.info = {"dtype": "as stored"}

    def first_token(self, prompt: Prompt) -> float:
        context = self._fresh(1)
        began = time.perf_counter()
        self._prefill(context, [prompt])
        return time.perf_counter() - began

    def decode(self, prompts: list[Prompt], tokens: int) -> float:
        context = self._fresh(len(prompts))
        chosen = self._prefill(context, prompts)
        position = len(prompts[0])
        began = time.perf_counter()
        for step in range(tokens):
            rows = [(token, position + step, row, True) for row, token in enumerate(chosen)]
            chosen = self._step(context, rows)
        return len(prompts) * tokens / (time.perf_counter() - began)

    def close(self) -> None:
        for context in self._contexts.values():
            self._lib.llama_free(context)
        self._lib.llama_model_free(self._model)

    def _context(self, sequences: int, threads: int) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx = sequences * 1024
        params.n_seq_max = sequences
        params.n_batch = params.n_ubatch = self.BATCH
        params.n_threads = params.n_threads_batch = threads
        return self._lib.llama_init_from_model(self._model, params)

    def _fresh(self, sequences: int) -> Any:
        context = self._contexts[sequences]
        self._lib.llama_memory_clear(self._lib.llama_get_memory(context), True)
        return context

    def _prefill(self, context: Any, prompts: list[Prompt]) -> list[int]:
        """All prompts in as few full batches as they take; the likeliest token after each."""
        chosen: list[int] = []
        rows: list[tuple[int, int, int, bool]] = []
        for number, prompt in enumerate(prompts):
            if len(rows) + len(prompt) > self.BATCH:
                chosen += self._step(context, rows)
                rows = []
            rows += [(token, at, number, at == len(prompt) - 1) for at, token in enumerate(prompt)]
        return chosen + self._step(context, rows)

    def _step(self, context: Any, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        import numpy as np

        batch = self._batch
        batch.n_tokens = len(rows)
        for at, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[at] = token
            batch.pos[at] = position
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = sequence
            batch.logits[at] = wanted
        code = self._lib.llama_decode(context, batch)
        if code != 0:
            raise SystemExit(f"llama_decode failed with {code}")
        return [
            int(np.ctypeslib.as_array(self._lib.llama_get_logits_ith(context, at), shape=(self.vocab_size,)).argmax())
            for at, row in enumerate(rows)
            if row[3]
        ]


# ---------------------------------------------------------------- the loop


def start(name: str, path: str, threads: int) -> Engine:
    if name == "firsttoken":
        return FirstToken(path, threads)
    if name == "llama.cpp":
        return LlamaCpp(path, threads)
    return Transformers(path, threads, {"bf16": "bfloat16", "fp32": "float32"}[name.removeprefix("transformers-")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # before torch reads it
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    began = time.perf_counter()
    engine = start(options.name, options.model, options.threads)
    tell({**engine.info, "load_s": round(time.perf_counter() - began, 3)})
    for line in sys.stdin:
        request = json.loads(line)
        draw = random.Random(request["seed"])
        # The first ids are control tokens in most vocabularies.
        prompts = [
            [draw.randrange(100, engine.vocab_size) for _ in range(request["context"])]
            for _ in range(request.get("batch", 1))
        ]
        if request["do"] == "decode":
            tell({"tokens_per_s": engine.decode(prompts, request["tokens"])})
        else:
            tell({"seconds": engine.first_token(prompts[0])})
    engine.close()


if __name__ == "__main__":
    main()
