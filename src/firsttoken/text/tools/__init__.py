"""Tool calls: who may be called, how a model writes a call, and how it is read back as the text comes."""
