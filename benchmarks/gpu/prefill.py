"""GPU time of a captured prefill, with attention's tiles and without attention at all.

python -m benchmarks.gpu.prefill random:llama-3.1-8b --output prefill.json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from benchmarks.gpu.decode_step import DecodeStep, NoAttention
from firsttoken.kernels.paged_attention.gpu import GPUAttention
from firsttoken.kernels.paged_attention.gpu_config import PrefillConfig, make_tiles
from firsttoken.models.step_view import StepView

TILES = [
    PrefillConfig(128, 128, 8, 2),
    PrefillConfig(128, 64, 8, 3),
    PrefillConfig(128, 32, 4, 3),
    PrefillConfig(64, 64, 4, 3),
]


def prompt_view(step: DecodeStep, tokens: int) -> StepView:
    """One prompt of so many tokens, the last of which samples."""
    one = np.zeros(1, np.int32)
    tiles = make_tiles(one, one + tokens, one, one, step.model.tile_rows)
    return replace(
        step.view(1, pdl=False),
        slots=step.ints(torch.zeros(tokens)),
        positions=step.ints(torch.arange(tokens)),
        tiles=step.ints(torch.from_numpy(tiles)),
        sample_rows=step.ints(torch.tensor([tokens - 1])),
        decode_rows=0,
        identity=False,
    )


def measure(step: DecodeStep, tokens: int) -> dict[str, Any]:
    model = step.model
    attention = model.attention
    chosen = attention.prefill_config

    def timed() -> float:
        view = prompt_view(step, tokens)
        return round(step.replay_ms(lambda: model.forward(view), 9), 3)

    result: dict[str, Any] = {"tokens": tokens, "ms": timed(), "tiles": {}}
    for config in TILES:
        attention.prefill_config = config
        model.tile_rows = config.tile_tokens
        result["tiles"][str(config)] = timed()
    attention.prefill_config = chosen
    model.tile_rows = chosen.tile_tokens
    heads = torch.zeros((tokens, model.config.num_heads * model.config.head_dim), dtype=torch.bfloat16, device="cuda")
    model.attention = cast(GPUAttention, NoAttention(heads))
    result["without_attention_ms"] = timed()
    model.attention = attention
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="random:llama-3.1-8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    step = DecodeStep(arguments.model, 1, max(arguments.tokens) + 16)
    rows = []
    for tokens in arguments.tokens:
        rows.append(measure(step, tokens))
        print(rows[-1], flush=True)
    if arguments.output:
        document = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "model": arguments.model}
        arguments.output.write_text(json.dumps({**document, "prefill": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
