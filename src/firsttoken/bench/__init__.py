"""Measures engines: batches, load that arrives by itself, single steps, layouts of memory; compares results."""
