"""A decoder-only transformer: embedding, layers, final norm, head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.kernels.paged_attention import AttentionContext, AttentionSpec
from firsttoken.models.blocks import Layer, Norm
from firsttoken.models.embedding import Embedding
from firsttoken.models.head import Head


class DecoderModel:
    """Holds weights, no state: the KV cache and everything about the step come with `AttentionContext`.

    The residual stream is float32 whatever the weights are; projections compute in ``dtype``. A row's result does not
    depend on the other rows but for the rounding of differently shaped products.
    """

    def __init__(
        self,
        config: ModelConfig,
        specs: Sequence[AttentionSpec],
        embedding: Embedding,
        layers: Sequence[Layer],
        final_norm: Norm,
        head: Head,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.specs = tuple(specs)
        self.embedding = embedding
        self.layers = list(layers)
        self.final_norm = final_norm
        self.head = head
        self.dtype = dtype

    @property
    def kv_dtype(self) -> str:
        """The KV format's dtype that fits this model: its own."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def nbytes(self) -> int:
        """Bytes of all kept weights."""
        return self.embedding.nbytes + self.head.nbytes + sum(layer.nbytes for layer in self.layers)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionContext, sample_rows: Tensor) -> Tensor:
        """Run one step and write its K and V.

        ``token_ids`` and ``positions`` are int64 ``[T]``, in the order of the context's segments; ``sample_rows``
        int64 ``[R]``, strictly ascending, names the rows whose next token is wanted. Gives their hidden state after
        the final norm, ``[R, hidden]`` in `dtype`.
        """
        attention.begin(self.specs, positions)
        hidden = self.embedding.rows(token_ids)
        last = self.layers[-1]
        for layer in self.layers[:-1]:
            layer.finish(hidden, layer.attend(hidden, attention))
        heads = last.attend(hidden, attention)
        # After the last KV write only rows that sample matter.
        if sample_rows.shape[0] != token_ids.shape[0]:
            hidden, heads = hidden.index_select(0, sample_rows), heads.index_select(0, sample_rows)
        if hidden.shape[0] == 0:
            return hidden.to(self.dtype)
        last.finish(hidden, heads)
        return self.final_norm(hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden [R, hidden]`` from `forward` -> ``[R, vocab]`` float32."""
        if hidden.shape[0] == 0:
            return hidden.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        return self.head(hidden)
