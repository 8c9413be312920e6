"""Linear layers over weights of four or eight bits, in the order in which tensor cores take them."""
