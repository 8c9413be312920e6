"""SwiGLU's gate: ``silu(gate) * up`` (Shazeer, 2020, "GLU Variants Improve Transformer")."""

from firsttoken.kernels.silu_mul.cpu import silu_mul

__all__ = ["silu_mul"]
