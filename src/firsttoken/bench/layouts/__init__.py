"""Memory layouts that are measured: what reads a tensor as the engine does, in each order it could be kept in."""
