"""A folder in Hugging Face layout as a `Checkpoint`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from firsttoken.checkpoint.bloom import ARCHITECTURE as BLOOM
from firsttoken.checkpoint.bloom import BloomTensors
from firsttoken.checkpoint.checkpoint import Checkpoint, CheckpointText, TensorSource
from firsttoken.checkpoint.fingerprint import fingerprint_files
from firsttoken.checkpoint.hf_config import read_config, read_generation
from firsttoken.checkpoint.hf_tokenizer import (
    TOKENIZER_FILE,
    read_chat_template,
    read_tokenizer,
    read_tokenizer_config,
)
from firsttoken.checkpoint.json_files import JSONObject, read_object
from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.checkpoint.quantized.tensors import QuantizedTensors, refuse_parts
from firsttoken.checkpoint.safetensors_files import SafetensorsFiles
from firsttoken.checkpoint.shapes import PREFIX, random_checkpoint, tensor_shapes
from firsttoken.core.errors import CheckpointError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"


def read_folder_config(folder: Path) -> JSONObject:
    """The folder's ``config.json``; raises `CheckpointError` when it has none."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(
            f"has no {CONFIG_FILE}: a model folder holds {CONFIG_FILE}, {TOKENIZER_FILE} and safetensors files",
            file=str(folder),
        )
    return read_object(path)


def open_folder(folder: Path, name: str | None = None) -> Checkpoint:
    """Open a model folder, served as ``name`` (default: the folder's own name). Raises `CheckpointError`."""
    source = read_folder_config(folder)
    config = read_config(source)
    files = SafetensorsFiles(folder)
    return Checkpoint(
        name=name or folder.resolve().name,
        source="folder",
        path=str(folder),
        config=config,
        fingerprint=fingerprint_files("folder", [folder / CONFIG_FILE, *files.paths]),
        tensors=_tensors(files, config, str(folder)),
        read_text=partial(_read_text, folder, source),
    )


def open_folder_without_weights(folder: Path) -> Checkpoint:
    """A model of the folder's configuration and text whose weights are drawn: none need be there. Raises
    `CheckpointError`, also for a configuration of rounded weights, which are not drawn."""
    source = read_folder_config(folder)
    config = read_config(source)
    if config.quantized is not None:
        raise CheckpointError(
            "says that weights are rounded, and random ones are not: leave its quantization_config out",
            file=str(folder / CONFIG_FILE),
        )
    return random_checkpoint(f"{PREFIX}{folder}", config, partial(_read_text, folder, source))


def _tensors(files: SafetensorsFiles, config: ModelConfig, path: str) -> TensorSource:
    if config.architecture == BLOOM:
        return BloomTensors(files, path)
    if config.quantized is None:
        refuse_parts(files, path)
        return files
    return QuantizedTensors(files, config.quantized, path, tensor_shapes(config))


def _read_text(folder: Path, source: JSONObject) -> CheckpointText:
    tokenizer_config = read_tokenizer_config(folder)
    tokenizer, tokenizer_eos = read_tokenizer(folder, tokenizer_config)
    generation_path = folder / GENERATION_FILE
    generation = read_object(generation_path) if generation_path.is_file() else JSONObject(str(generation_path), {})
    return CheckpointText(
        generation=read_generation(source, generation, tokenizer_eos),
        tokenizer=tokenizer,
        chat_template=read_chat_template(folder, tokenizer_config),
    )
