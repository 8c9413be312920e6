"""Token embedding: the first rows of the residual stream, from tokens that stay on the device."""
