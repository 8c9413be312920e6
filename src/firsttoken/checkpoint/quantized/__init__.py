"""Checkpoints whose linears are stored as rounded numbers: what ``config.json`` says of them, and their tensors."""
