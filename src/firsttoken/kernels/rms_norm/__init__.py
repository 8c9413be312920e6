"""Root-mean-square normalisation (Zhang and Sennrich, 2019, "Root Mean Square Layer Normalization")."""

from firsttoken.kernels.rms_norm.cpu import RMSNorm

__all__ = ["RMSNorm"]
