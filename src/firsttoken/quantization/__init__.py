"""Linear methods: how a projection's weights are kept and multiplied. Nothing here quantises activations."""

from firsttoken.quantization.linear import GatedLinear, Linear, LinearMethod
from firsttoken.quantization.methods import QUANTIZATIONS, linear_method
from firsttoken.quantization.stored import StoredTensor

__all__ = ["QUANTIZATIONS", "GatedLinear", "Linear", "LinearMethod", "StoredTensor", "linear_method"]
