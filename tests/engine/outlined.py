"""An executor on torch's meta device: the bytes of what it makes, and the most that is alive in some of its steps.

Runs in a process of its own, since Triton must not be its interpreter there, and prints one JSON object.

    python -m tests.engine.outlined random:llama-3.1-8b none
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def outline_in_subprocess(model: str, quantization: str = "none") -> dict[str, int]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-m", "tests.engine.outlined", model, quantization]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def main(name: str, quantization: str) -> None:
    from triton import knobs

    from firsttoken.checkpoint.locate import open_checkpoint
    from firsttoken.core.engine_args import EngineArgs
    from firsttoken.devices.cuda import PlannedGPU
    from firsttoken.engine.resolve import resolve
    from firsttoken.executor.ahead.gpus import KNOWN
    from firsttoken.executor.ahead.messages import Order
    from firsttoken.executor.ahead.outline import outline
    from firsttoken.executor.ahead.plan import RANDOM
    from firsttoken.executor.ahead.target import compile_for
    from tests.support.live_bytes import LiveBytes

    def leave_out(*, key: str, fn: Any, **_: object) -> bool:
        fn.jit_function.device_caches[0][0][key] = leave_out
        return True

    compile_for(90)
    knobs.runtime.jit_cache_hook = leave_out
    gpu, checkpoint = KNOWN["h200"], open_checkpoint(name)
    config = resolve(EngineArgs(model=name, quantization=quantization), checkpoint, [PlannedGPU(gpu)])[1].executor
    with LiveBytes("meta") as making:
        executor = outline(Order(model=checkpoint.config, executor=config, gpu=gpu, processes=1, quietly=True))
    model = executor._model
    weights = model.nbytes + sum(layer.attention_gain.nbytes + layer.mlp_gain.nbytes for layer in model.layers)
    weights += model.final_gain.nbytes
    if not checkpoint.config.tie_word_embeddings:
        weights += model.head.nbytes  # on this device all tensors have one address
    pool = config.kv_blocks * config.kv_format.bytes_per_block
    table = executor.table
    rows = making.now - weights - pool
    with LiveBytes("meta") as angles:
        executor.rehearse((table.shape(1, [], 0), RANDOM))
    found = {"rows": rows + angles.now}
    shapes = {
        "decode_64": table.shape(64, [], 0),
        "prompt_512": table.shape(0, [512], 1),
        "prompt_8192": table.shape(0, [8192], 1),
        "mixed": table.shape(64, [448], 1),
        "many": table.shape(0, [16] * 60, 60),
    }
    for label, shape in shapes.items():
        with LiveBytes("meta") as step:
            executor.rehearse((shape, RANDOM))
        found[label] = step.peak
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
