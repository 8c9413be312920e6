"""Measured kernel configs, one JSON file for each kind of GPU, and the choice where nothing was measured.

Kernels are tuned inside the decode graph, where neighbours compete for the multiprocessors, so the files are written by
a tuner that runs there and only read here.
"""

from firsttoken.kernels.tuning.store import (
    TunedFile,
    TunedLinear,
    TunedPacked,
    linear_config,
    packed_config,
    product_config,
    read_tuned,
    tuned_for,
    write_tuned,
)

__all__ = [
    "TunedFile",
    "TunedLinear",
    "TunedPacked",
    "linear_config",
    "packed_config",
    "product_config",
    "read_tuned",
    "tuned_for",
    "write_tuned",
]
