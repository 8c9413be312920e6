"""Measurements; each file says how it is run."""
