"""Products of a few rows with a weight matrix, where reading the weights is all that costs.

`small.small_linear` is the call (it imports Triton, so import it where a GPU is used); `config.py` describes how a
product is computed, `reference.py` is the arithmetic in float64, `tune.py` lists configs worth measuring.
"""

from firsttoken.kernels.linear.config import LinearConfig, OpKind, default_config, row_bucket

__all__ = ["LinearConfig", "OpKind", "default_config", "row_bucket"]
