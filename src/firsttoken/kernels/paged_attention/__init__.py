"""Attention over the paged KV cache, with everything that depends on a token's position behind one seam.

`AttentionContext.attend` takes the raw QKV projection; QK norm, RoPE, the KV write and attention itself are inside, so
that one fused kernel can replace them. `reference.py` is the plain form that the fast ones are tested against;
`cpu.py` is torch on the CPU. Own C++ kernels will stand beside it as `cpu.cpp`.
"""

from firsttoken.kernels.paged_attention.cpu import AttentionContext
from firsttoken.kernels.paged_attention.params import AttentionParams, AttentionSpec, Segment
from firsttoken.kernels.paged_attention.pool import KVPool

__all__ = ["AttentionContext", "AttentionParams", "AttentionSpec", "KVPool", "Segment"]
