"""How a linear's weights are rounded for the least error of its output: rounding, GPTQ, AWQ, and a choice of them."""
