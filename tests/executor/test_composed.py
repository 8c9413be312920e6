"""Families without fused layers on the graphs' executor, and windows in those with: against float32 on the CPU."""

from __future__ import annotations

import pytest

from firsttoken.checkpoint.model_config import RopeConfig
from firsttoken.core.plan import RowWork
from tests.executor.test_graph_executor import Driver, Reference, close, make_executor, make_weights, prompt

CASES = {
    "BloomForCausalLM": {
        "rope": None,
        "alibi": True,
        "num_heads": 4,
        "num_kv_heads": 4,
        "attention_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "intermediate_size": 256,
        "tie_word_embeddings": True,
    },
    "Gemma2ForCausalLM": {
        "windows": (20, None),
        "attention_softcap": 50.0,
        "logit_softcap": 30.0,
        "attention_scale": 0.2,
        "tie_word_embeddings": True,
    },
    "Gemma3ForCausalLM": {
        "windows": (20, None),
        "local_rope": RopeConfig(theta=100.0),
        "qk_norm": True,
        "tie_word_embeddings": True,
    },
    "MistralForCausalLM": {"windows": (20, 20)},
}


@pytest.mark.parametrize("architecture", CASES)
def test_prefill_chunk_and_decode_give_the_references_logits(architecture):
    checkpoint = make_weights(architecture, **CASES[architecture])
    driver, reference = Driver(make_executor(checkpoint)), Reference(checkpoint)
    row, start = driver.start(1, prompt(41, 2))
    driver.step([RowWork(1, 0, 25, False)], [start])
    [token] = driver.step([RowWork(1, 25, 16, True)])
    assert close(driver.logits[0], reference.after(row.tokens))
    row.tokens.append(token)
    for _ in range(3):
        driver.decode([row])
    assert close(driver.logits[0], reference.after(row.tokens[:-1]))
