"""Finding, fetching and reading model files: folders, GGUF, hub repositories, aliases. Torch-free, bounded, no pickle."""
