"""What the graphs' executor reads of prompts, vectors and log-probabilities, against float32 on the CPU."""

from __future__ import annotations

from array import array

import msgspec
import pytest
import torch

from firsttoken.core.plan import RowWork, StepPlan
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.kernels.paged_attention import AttentionContext, Segment
from firsttoken.models import load_model
from tests.executor.test_composed import CASES
from tests.executor.test_graph_executor import Driver, close, make_executor, make_weights, prompt
from tests.support.tiny_models import Runner

SCORE = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=4)
# oneDNN's products read past the end of a row of 88 into the next one, which may be padding and NaN.
WHOLE = {"intermediate_size": 96}
# The family, changes to it, and how many tokens of the longest prompt are in its first chunk.
KINDS = {
    "few rows": ("LlamaForCausalLM", WHOLE, 20),
    "many rows": ("Qwen3ForCausalLM", WHOLE, 42),
    "composed": ("Gemma2ForCausalLM", CASES["Gemma2ForCausalLM"] | WHOLE, 20),
}


def hidden_and_logits(checkpoint, tokens):
    """Of all positions, in float32."""
    model = load_model(checkpoint, device="cpu", dtype="float32", quantization="none")
    runner = Runner(model)
    context = AttentionContext.build(runner.pool, [Segment(runner.table(tokens, 0), 0, len(tokens))])
    rows = torch.arange(len(tokens))
    hidden = model.forward(torch.tensor(tokens), rows, context, rows)
    return hidden, model.logits(hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_read_in_chunks_beside_a_decoding_row(kind):
    """A row that decodes, two prompts of which a vector is wanted, and one whose log-probabilities are."""
    architecture, changes, chunk = KINDS[kind]
    checkpoint = make_weights(architecture, **changes)
    driver = Driver(make_executor(checkpoint, step_tokens=96))
    decoding, start = driver.start(0, prompt(15, 1))
    decoding.tokens += driver.step([RowWork(0, 0, 15, True)], [start])
    mean, start_mean = driver.start(1, prompt(chunk + 14, 2))
    last, start_last = driver.start(2, prompt(16, 3))
    scored, start_scored = driver.start(3, prompt(24, 4), SCORE)
    starts = [
        msgspec.structs.replace(start_mean, pooling="mean"),
        msgspec.structs.replace(start_last, pooling="last"),
        start_scored,
    ]
    first = [RowWork(0, 15, 1, True), RowWork(1, 0, chunk, False), RowWork(2, 0, 16, True), RowWork(3, 0, 11, False)]
    begun = driver.submit(first, starts)
    # Before the first is read: what is kept of prompts stays on the device.
    ended = driver.submit(
        [RowWork(0, 16, 1, True), RowWork(1, chunk, 14, True), RowWork(3, 11, 13, True)], (), driver.grow(decoding, 16)
    )
    token, pooled_last = begun.result().samples
    second, pooled_mean, told = ended.result().samples
    assert not begun.result().captured
    assert [sample.error for sample in (token, pooled_last, second, pooled_mean, told)] == [None] * 5

    if kind == "few rows":  # the row alone, without anything read beside it
        alone = Driver(make_executor(checkpoint))
        other, start = alone.start(0, prompt(15, 1))
        other.tokens += alone.step([RowWork(0, 0, 15, True)], [start])
        for _ in range(2):
            alone.decode([other])
        assert [*decoding.tokens, token.token, second.token] == other.tokens

    hidden, _ = hidden_and_logits(checkpoint, mean.tokens)
    assert close(torch.tensor(array("f", pooled_mean.pooled)), hidden.mean(0))
    hidden, _ = hidden_and_logits(checkpoint, last.tokens)
    assert close(torch.tensor(array("f", pooled_last.pooled)), hidden[-1])
    _, logits = hidden_and_logits(checkpoint, scored.tokens)
    expected = torch.log_softmax(logits, -1)[:-1]
    entries = list(told.prompt_logprobs.entries())
    own = torch.tensor([entry.logprob for entry in entries])
    assert close(own, expected.gather(1, torch.tensor(scored.tokens[1:])[:, None])[:, 0])
    assert close(torch.tensor([entry.top_logprobs for entry in entries]), expected.topk(4).values)
    assert all(
        entry.rank == 1 or entry.top_ids[0] != token for entry, token in zip(entries, scored.tokens[1:], strict=True)
    )


def test_a_prompt_that_begins_anew_forgets_what_was_read():
    """A row given back in the midst of its prompt, as by preemption, and the next one in its place."""
    checkpoint = make_weights("LlamaForCausalLM", **WHOLE)
    driver = Driver(make_executor(checkpoint))
    row, start = driver.start(1, prompt(40, 2))
    start = msgspec.structs.replace(start, pooling="mean")
    driver.submit([RowWork(1, 0, 30, False)], [start])
    plan = StepPlan(50, [RowWork(1, 0, 40, True)], [start], retire=[1])
    [sample] = driver.executor.submit(plan).result().samples
    hidden, _ = hidden_and_logits(checkpoint, row.tokens)
    assert close(torch.tensor(array("f", sample.pooled)), hidden.mean(0))
    _, start = driver.start(1, prompt(5, 3))
    [plain] = driver.executor.submit(StepPlan(51, [RowWork(1, 0, 5, True)], [start], retire=[1])).result().samples
    assert plain.pooled is None
