"""What is alive at once while prompts are read (`executor.prompt_readers`), after the step's own tensors are gone."""

from __future__ import annotations

from firsttoken.checkpoint.model_config import ModelConfig

# As in `sampling.prompt_logprobs`: positions with logits, and those whose logits are put in order, on a CPU.
ROWS, CPU_ROWS = 32, 4
# Bytes a logit: itself and as the head gave it before, the integers that it is ordered by, and an id of each token
# (measured by a count of what is alive, which a test repeats).
_LOGIT, _ORDERED, _ID = 4 + 2, 35, 8


def reading_bytes(model: ModelConfig, rows: int, *, element: int, on_cpu: bool) -> int:
    """Of the largest step, of ``rows`` tokens of prompts, hidden states of ``element`` bytes a number."""
    ordered = _ORDERED * (CPU_ROWS if on_cpu else ROWS)
    return 2 * element * rows * model.hidden_size + (_LOGIT * ROWS + ordered + _ID) * model.vocab_size
