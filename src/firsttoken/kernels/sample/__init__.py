"""Choosing tokens on the device: best or random, with bias, penalties and log-probabilities. Nothing is sorted."""
