"""Layer normalisation with gain and bias (Ba et al., 2016, "Layer Normalization")."""

from firsttoken.kernels.layer_norm.cpu import LayerNorm

__all__ = ["LayerNorm"]
