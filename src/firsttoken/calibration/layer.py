"""A decoder layer of Llama's kind in plain torch: what calibration asks inputs of, one step at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.kernels.paged_attention import AttentionSpec


@dataclass(frozen=True, slots=True, eq=False)
class PlainLayer:
    """``tensors``: the layer's, by names without ``model.layers.N.``: matrices in the dtype that products compute in,
    the others float32. ``hidden`` and what the methods give are float32 ``[windows, T, width]``, each window a text of
    its own."""

    config: ModelConfig
    spec: AttentionSpec
    window: int | None
    tensors: Mapping[str, Tensor]

    def attention_input(self, hidden: Tensor) -> Tensor:
        return self._norm(hidden, "input_layernorm")

    def heads(self, hidden: Tensor) -> Tensor:
        """Attention's heads, before the output projection."""
        x = self.attention_input(hidden)
        q, k, v = (self._heads(self._linear(x, f"self_attn.{name}_proj")) for name in "qkv")
        if self.config.qk_norm:
            q, k = self._norm(q, "self_attn.q_norm"), self._norm(k, "self_attn.k_norm")
        q, k = self._rotated(q), self._rotated(k)
        length = hidden.shape[1]
        mask = None
        if self.window is not None and self.window < length:
            behind = torch.arange(length, device=hidden.device)
            behind = behind[:, None] - behind[None, :]
            mask = (behind >= 0) & (behind < self.window)
        found = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        return found.transpose(1, 2).flatten(2)

    def attended(self, hidden: Tensor) -> Tensor:
        """The residual stream after attention."""
        return hidden + self._linear(self.heads(hidden), "self_attn.o_proj")

    def mlp_input(self, middle: Tensor) -> Tensor:
        """``middle``: what `attended` gives."""
        return self._norm(middle, "post_attention_layernorm")

    def gated(self, middle: Tensor) -> Tensor:
        """What the MLP's last projection reads."""
        x = self.mlp_input(middle)
        return F.silu(self._linear(x, "mlp.gate_proj")) * self._linear(x, "mlp.up_proj")

    def finished(self, middle: Tensor) -> Tensor:
        """The residual stream after the layer."""
        return middle + self._linear(self.gated(middle), "mlp.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
        found = F.linear(x.to(weight.dtype), weight).float()
        return found if bias is None else found + bias

    def _norm(self, x: Tensor, name: str) -> Tensor:
        gain = self.tensors[f"{name}.weight"]
        found: Tensor = F.rms_norm(x, gain.shape, gain, self.config.rms_norm_eps)
        return found

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.config.head_dim).transpose(1, 2)

    def _rotated(self, x: Tensor) -> Tensor:
        """Rotates elements that lie half a head apart, as checkpoints have them."""
        rope = self.spec.rope
        assert rope is not None, "layers of this kind have one"
        angles = torch.outer(torch.arange(x.shape[-2], device=x.device).float(), rope.inv_freq)
        cos, sin = angles.cos() * rope.scaling, angles.sin() * rope.scaling
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
