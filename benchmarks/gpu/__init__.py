"""Checks and measurements that need a GPU."""
