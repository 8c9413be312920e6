"""From an opened checkpoint to a model ready to run."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Imported for what they register.
import firsttoken.models.bloom
import firsttoken.models.gemma
import firsttoken.models.llama
import firsttoken.models.qwen2
import firsttoken.models.qwen3  # noqa: F401
from firsttoken.checkpoint.checkpoint import Checkpoint, TensorSource
from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.core.errors import CheckpointError, ConfigError
from firsttoken.models.attention import attention_specs, spec_of_layer
from firsttoken.models.blocks import Builder, LayerBuilder
from firsttoken.models.decoder import DecoderModel
from firsttoken.models.head import CappedHead, FullHead, Head, RefinedHead
from firsttoken.models.registry import family_of
from firsttoken.models.tensors import EMBEDDING, HEAD, check_tensors, expected_tensors
from firsttoken.models.weights import RandomWeights, StoredWeights, Weights
from firsttoken.quantization import LinearMethod, StoredTensor, linear_method
from firsttoken.quantization.row_table import RowTable

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@torch.inference_mode()
def load_model(
    checkpoint: Checkpoint, *, device: str, dtype: str, quantization: str, threads: int | None = None
) -> DecoderModel:
    """Read, check and pack all weights.

    ``dtype`` "float32" or "bfloat16"; ``quantization`` "none" (weights dequantised to ``dtype``), "packed" (4-bit
    weights stay 4-bit for few rows), "int8" or "int4" (rounded), all but "none" in bfloat16; ``threads`` sets torch's
    compute threads for the process. Raises `ConfigError` for a value that cannot be honoured and `CheckpointError` for
    tensors that do not fit the config.
    """
    if device != "cpu":
        raise ConfigError(f"device {device!r} is not supported: models run on 'cpu'")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported: choose one of {', '.join(DTYPES)}")
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"threads must be 1 or more, got {threads}")
        torch.set_num_threads(threads)
    method = linear_method(quantization, DTYPES[dtype], as_stored=checkpoint.config.quantized is not None)
    return build_decoder(checkpoint.config, model_weights(checkpoint, method.dtype), method)


def build_decoder(
    config: ModelConfig, weights: Weights, method: LinearMethod, device: torch.device | str = "cpu"
) -> DecoderModel:
    """The decoder of ``config``; ``weights`` must give tensors on ``device``."""
    family = family_of(config.architecture)
    specs = attention_specs(config, str(device))
    builder = Builder(config, weights, method, family.norm_offset)
    embedding = weights.matrix(EMBEDDING)
    table = RowTable(embedding, method.dtype)
    tied = config.tie_word_embeddings
    head = _head(embedding, table, method) if tied else _head(weights.matrix(HEAD), None, method)
    return DecoderModel(
        config=config,
        specs=specs,
        embedding=family.embedding(builder, table),
        layers=[
            family.build_layer(
                LayerBuilder(
                    config, weights, method, family.norm_offset, spec=spec_of_layer(config, specs, index), index=index
                )
            )
            for index in range(config.num_layers)
        ],
        final_norm=family.final_norm(builder),
        head=head if config.logit_softcap is None else CappedHead(head, config.logit_softcap),
        dtype=method.dtype,
    )


def _head(matrix: StoredTensor, table: RowTable | None, method: LinearMethod) -> Head:
    """``table`` holds the rows of ``matrix`` where they are kept already: a tied head."""
    linear, rows = method.head(matrix)
    if method.dtype == torch.float32:
        return FullHead(linear)
    return RefinedHead(linear, table or rows or RowTable(matrix, method.dtype))


def model_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    stored: Callable[[TensorSource], Weights] = StoredWeights,
) -> Weights:
    """The checked tensors of a checkpoint by name: random ones made on ``device``, others read by ``stored``.

    Raises `CheckpointError`.
    """
    check_tensors(checkpoint.config, checkpoint.tensors.infos(), checkpoint.path)
    if checkpoint.source == "random":
        return RandomWeights(expected_tensors(checkpoint.config), dtype, device)
    weights = stored(checkpoint.tensors)
    if checkpoint.config.tie_word_embeddings and HEAD in checkpoint.tensors.infos():
        _check_tied(weights, checkpoint.path)
    return weights


def _check_tied(weights: Weights, path: str) -> None:
    """Some exports write a tied head out. It may be left unread only because it is the embedding."""
    head = weights.matrix(HEAD)
    if head.rounded is not None or not torch.equal(head.data, weights.matrix(EMBEDDING).data):
        raise CheckpointError(
            "the configuration ties the head to the embedding, but the file's head differs from it",
            file=path,
            field=HEAD,
        )
