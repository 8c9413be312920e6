"""The real default model through the whole engine: text, templates, scheduler, KV cache, sampling."""

from __future__ import annotations

import pytest
import torch

from firsttoken import LLM, SamplingParams
from firsttoken.checkpoint.locate import open_checkpoint
from tests.support.hf_reference import transformers_llama

pytestmark = pytest.mark.model

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "Water boils at",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 3, 4, 5, 6,",
    "Question: What is photosynthesis?\nAnswer:",
    "El perro corre por",
    "The meaning of life is",
    "import numpy as np\n\nx = np.",
    "In 1969, Neil Armstrong",
    "To make a good cup of tea, you",
    "Café crème — 2024-11-29 😊",
    "The quick brown fox",
    "Roses are red,",
    "A list of European countries:\n- Germany\n- ",
    "The speed of light is approximately",
    "SELECT name FROM users WHERE",
    "She opened the door and saw",
]


@pytest.fixture(scope="module")
def unpacked():
    with LLM("smollm2", device="cpu", quantization="none", threads=1, offline=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def default():
    """As users get it: packed where the CPU has bfloat16 instructions, float32 elsewhere."""
    with LLM("smollm2", device="cpu", threads=1, offline=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def together(unpacked):
    """The greedy answers to all prompts, batched."""
    return unpacked.generate(PROMPTS, GREEDY)


@pytest.mark.timeout(300)
def test_greedy_text_of_64_tokens_is_that_of_transformers_for_20_prompts(together):
    """Each sampled token is the reference's most likely one after the same tokens, hence the greedy texts are equal."""
    reference = transformers_llama(open_checkpoint("smollm2", offline=True))
    for output in together:
        tokens = list(output.outputs[0].token_ids)
        assert len(tokens) == 64
        ids = torch.tensor([[*output.prompt_token_ids, *tokens]])
        with torch.inference_mode():
            logits = reference(ids).logits[0]
        assert logits[len(output.prompt_token_ids) - 1 : -1].argmax(-1).tolist() == tokens, output.prompt


def test_alone_batched_cached_and_chunked_give_the_same_tokens(unpacked, together):
    few = GREEDY.replace(max_tokens=16)
    alone = [unpacked.generate(prompt, few)[0].outputs[0].token_ids for prompt in PROMPTS[:4]]
    assert [list(tokens) for tokens in alone] == [list(one.outputs[0].token_ids)[:16] for one in together[:4]]


def test_it_knows_the_capital_of_france(default):
    [output] = default.chat(
        [{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0, max_tokens=32)
    )
    answer = output.outputs[0]
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
    assert "<|im_end|>" not in answer.text


def test_a_long_context_is_read_to_its_beginning(default):
    filler = "The weather was mild and nothing of note happened that day. " * 60
    messages = [{"role": "user", "content": f"My name is Zebulon. {filler} What is my name?"}]
    first, again = (default.chat(messages, SamplingParams(temperature=0, max_tokens=24))[0] for _ in range(2))
    assert len(first.prompt_token_ids) > 700
    assert "Zebulon" in first.outputs[0].text
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.num_cached_tokens >= len(first.prompt_token_ids) - 17


def test_the_same_seed_gives_the_same_text_in_any_company(default):
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=20)
    alone = default.generate(PROMPTS[1], params)[0].outputs[0].token_ids
    again = default.generate(PROMPTS[1], params)[0].outputs[0].token_ids
    assert again == alone
    other = default.generate(PROMPTS[1], params.replace(seed=8))[0].outputs[0].token_ids
    assert other != alone
