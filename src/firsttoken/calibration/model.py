"""A checkpoint's layers one at a time, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from firsttoken.calibration.layer import PlainLayer
from firsttoken.checkpoint.checkpoint import Checkpoint
from firsttoken.core.errors import ConfigError
from firsttoken.models.attention import attention_specs, spec_of_layer
from firsttoken.models.load import model_weights
from firsttoken.models.registry import family_of
from firsttoken.models.tensors import EMBEDDING, expected_tensors
from firsttoken.quantization.unpacked import can_prepack

# What all that is not rounded is stored in.
STORED = torch.bfloat16


class PlainModel:
    """Raises `ConfigError` for an architecture whose layers are not Llama's, and `CheckpointError` for tensors that do
    not fit the configuration."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self.config = checkpoint.config
        architecture = self.config.architecture
        family = family_of(architecture)
        if not family.fused:
            raise ConfigError(
                f"{architecture} cannot be quantized here: its layers are not built as those of Llama, Mistral, "
                "SmolLM2, Qwen2 and Qwen3"
            )
        if self.config.quantized is not None:
            raise ConfigError(
                f"{checkpoint.name} is quantized already ({self.config.quantized}): name the model with weights in full"
            )
        self.device = device
        # bfloat16 products where the device has them: inputs need no more, and take a third of the time.
        self.dtype = torch.bfloat16 if device.type == "cuda" or can_prepack(torch.bfloat16) else torch.float32
        self.names = expected_tensors(self.config)
        self._in_layer = family.layer_tensors(self.config)
        self._weights = model_weights(checkpoint, torch.float32, device)
        self._specs = attention_specs(self.config, str(device))

    def tensor(self, name: str) -> Tensor:
        """Float32, on the device."""
        if len(self.names[name]) == 2:
            return self._weights.matrix(name).dequantize(torch.float32).to(self.device)
        return self._weights.vector(name).to(self.device)

    def layer(self, index: int) -> dict[str, Tensor]:
        """The layer's tensors, float32 on the device, by names without ``model.layers.N.``."""
        return {name: self.tensor(f"model.layers.{index}.{name}") for name in self._in_layer}

    def plain(self, index: int, tensors: Mapping[str, Tensor]) -> PlainLayer:
        """The layer with ``tensors``, which are float32."""
        ready = {name: tensor.to(self.dtype) if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}
        spec = spec_of_layer(self.config, self._specs, index)
        return PlainLayer(self.config, spec, self.config.window(index), ready)

    def embedding(self) -> Tensor:
        """``[vocab, hidden]``, on the CPU."""
        return self._weights.matrix(EMBEDDING).dequantize(torch.float32).cpu()


def stored(tensor: Tensor) -> Tensor:
    """A tensor that is not rounded, as it is read back: float32."""
    return tensor.to(STORED).float()
