"""Between text and tokens: chat templates, tokenizer, incremental detokeniser, stop strings. Torch-free."""
