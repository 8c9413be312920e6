"""``/v1/messages``, as Anthropic's: blocks in, blocks out."""
