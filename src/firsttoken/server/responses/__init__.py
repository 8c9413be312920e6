"""``/v1/responses``, as OpenAI's: items in, items out, and answers that are kept for a while."""
