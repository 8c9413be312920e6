"""Finding, fetching and reading model files: folder, GGUF, hub, alias, ``random:``. Torch-free, bounded, no pickle."""
