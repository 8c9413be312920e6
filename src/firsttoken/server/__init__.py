"""The HTTP side: an OpenAI-compatible server on `frontend.AsyncLLM`. Torch-free, and blind to the engine's inside."""
