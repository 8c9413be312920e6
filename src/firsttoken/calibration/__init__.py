"""A whole model rounded to few bits with the help of a text, layer by layer, into a folder that can be served."""
