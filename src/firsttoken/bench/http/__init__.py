"""Load on any OpenAI-compatible server over HTTP/1.1, measured from outside."""
