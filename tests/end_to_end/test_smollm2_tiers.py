"""The real default model with host memory and files below a tiny cache: each session gets its own answers, token by
token those without tiers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from firsttoken import LLM, SamplingParams
from firsttoken.kvcache.tiers import cost

pytestmark = pytest.mark.model

WORDS = ("banana", "castle", "violin", "tiger")
OUTPUT = 8
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
# Tokens, which the sessions' last prompts do not reach; and what is known of the model's KV: float32 for 16 tokens.
LONGEST, BLOCK_BYTES = 256, 30 * 2 * 3 * 64 * 16 * 4


def engine(**tiers: Any) -> LLM:
    return LLM("smollm2", device="cpu", quantization="none", dtype="float32", threads=1, offline=True, **tiers)


def ask(llm: LLM, sessions: list[str]) -> tuple[list[list[int]], list[str], Counter[str]]:
    """All at once: the answers' tokens and texts, and where prompts were found."""
    found = Counter[str]()
    outputs = llm.generate(sessions, GREEDY)
    for output in outputs:
        assert len(output.prompt_token_ids) + OUTPUT < LONGEST
        found.update(output.metrics["cached_tokens"])
    answers = [output.outputs[0] for output in outputs]
    return [list(answer.token_ids) for answer in answers], [answer.text for answer in answers], found


@pytest.mark.timeout(300)
def test_four_sessions_keep_their_code_words_in_tiny_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "WORTH", 1e9)  # an engine that has measured nothing yet may think computing sooner
    question = "\nWhoever wants to come in must say"
    filler = "Nobody else knows it, and it is never written down. " * 5
    rounds = [[f"The code word of this room is {word}. {question[1:]} {word}. {filler}{question}" for word in WORDS]]
    expected = []
    with engine() as plain:
        for _ in range(3):
            tokens, texts, _ = ask(plain, rounds[-1])
            for text, word in zip(texts, WORDS, strict=True):
                assert [each for each in WORDS if each in text] == [word], "the sessions cannot be told apart"
            expected.append(tokens)
            rounds.append([f"{asked}{text}{question}" for asked, text in zip(rounds[-1], texts, strict=True)])
    pools = {"kv_memory": 20 * BLOCK_BYTES, "max_model_len": LONGEST, "max_num_seqs": 2}
    tiers = {"kv_host_memory": 32 * BLOCK_BYTES, "kv_disk": str(tmp_path)}
    with engine(**pools, **tiers) as tight:
        for number in range(2):
            tokens, _, found = ask(tight, rounds[number])
            assert tokens == expected[number]
    assert found["host"] + found["disk"] > 4 * 32, f"hardly anything was restored: {found}"
    with engine(**pools, **tiers) as again:
        tokens, _, found = ask(again, rounds[2])
    assert tokens == expected[2], "after a restart"
    # 448 of four sessions on a machine with nothing else to do, 112 of one where the files were read late.
    assert found["disk"] >= 64, f"hardly anything came from files: {found}"
