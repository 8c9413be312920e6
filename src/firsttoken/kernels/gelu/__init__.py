"""GELU by its tanh form (Hendrycks and Gimpel, 2016), alone and as a gate (Shazeer, 2020, "GLU Variants")."""

from firsttoken.kernels.gelu.cpu import gelu, gelu_mul

__all__ = ["gelu", "gelu_mul"]
