"""What the readers of a model's answers are called (`text.answer_formats`), for those who only check a name: the
readers themselves take longer to import than an engine to launch."""

AUTO, NONE = "auto", "none"
TOOL_PARSERS = (AUTO, "hermes", "llama3", "mistral", "qwen3_coder", NONE)
REASONING_PARSERS = (AUTO, "qwen3", "deepseek_r1", NONE)
