"""Answers held to a grammar: what is compiled of it, the tokens that it allows next, the shortest way to its end."""
