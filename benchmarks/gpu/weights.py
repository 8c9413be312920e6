"""How fast an engine loads a safetensors folder, beside what its disk and its bus give.

    python -m benchmarks.gpu.weights --shape llama-3.1-8b --folder FOLDER [--device cuda] [--output weights.json]

Writes random weights of the shape into FOLDER, unless they lie there; reads the files as they are, from the page cache,
copies pinned memory to the device, and starts an engine on the folder. Told are GB/s of each, and the account of the
start, which adds up to the time from the command to the first token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from firsttoken.checkpoint.hf_write import config_values, write_config
from firsttoken.checkpoint.locate import open_checkpoint

FILE_BYTES = 4 << 30
READ_BYTES = 64 << 20


def write_folder(shape: str, folder: Path) -> None:
    """A folder as published checkpoints are, of a Llama-like ``shape``."""
    checkpoint = open_checkpoint(f"random:{shape}")
    folder.mkdir(parents=True)
    write_config(folder, config_values(checkpoint))
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    places: dict[str, str] = {}
    batch: dict[str, torch.Tensor] = {}
    number = held = 0
    infos = checkpoint.tensors.infos()
    for name, info in infos.items():
        batch[name] = torch.empty(info.shape, dtype=torch.bfloat16, device=device).normal_(std=0.02).cpu()
        held += batch[name].nbytes
        places[name] = f"model-{number:05d}.safetensors"
        if held >= FILE_BYTES or name == list(infos)[-1]:
            save_file(batch, folder / places[name])
            batch, held, number = {}, 0, number + 1
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def read_gb_s(files: list[Path]) -> float:
    """Of reading the files from the page cache into one buffer."""
    buffer = bytearray(READ_BYTES)
    for _ in range(2):  # the first brings them into the cache
        began, total = time.monotonic(), 0
        for path in files:
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    total += count
        seconds = time.monotonic() - began
    return total / seconds / 1e9


def copy_gb_s() -> float | None:
    """Of copies from pinned memory to the device; None without one."""
    if not torch.cuda.is_available():
        return None
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    for _ in range(2):
        began = time.monotonic()
        for _ in range(4):
            there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        seconds = time.monotonic() - began
    return 4 * host.nbytes / seconds / 1e9


def start(folder: Path, device: str) -> dict[str, Any]:
    words = ["bench", "latency", str(folder), "--device", device, "--batch", "1", "--input", "32", "--output", "4"]
    words += ["--repeat", "1", "--warmup", "0", "--max-model-len", "256", "--json"]
    done = subprocess.run([sys.executable, "-m", "firsttoken.cli.main", *words], capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.decode()[-2000:])
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not arguments.folder.exists():
        write_folder(arguments.shape, arguments.folder)
    files = sorted(arguments.folder.glob("*.safetensors"))
    nbytes = sum(path.stat().st_size for path in files)
    found = {"gib": nbytes / 2**30, "read_gb_s": read_gb_s(files), "copy_gb_s": copy_gb_s()}
    starts = [start(arguments.folder, arguments.device) for _ in range(2)]
    best = min(starts, key=lambda one: one["start_ms"]["weights"])
    found["start_ms"] = best["start_ms"]
    found["start_s"] = best["start_s"]
    found["weights_gb_s"] = nbytes / best["start_ms"]["weights"] / 1e6
    print(json.dumps(found, indent=1))
    if arguments.output:
        head = {key: best[key] for key in ("date", "commit", "versions", "device_name", "model")}
        arguments.output.write_text(json.dumps({**head, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
