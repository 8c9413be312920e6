"""The sampler whose state and work stay on the device; `sampler` imports Triton, so import it where a GPU is in use."""
