"""Kernels compiled ahead: by processes that never touch the GPU, before a step needs them."""
