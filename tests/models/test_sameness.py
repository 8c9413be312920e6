"""The same tokens give the same logits however they are cut into steps and whoever is in the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from firsttoken.kernels.paged_attention import AttentionContext, Segment
from firsttoken.models import DecoderModel, load_model
from firsttoken.models.tensors import expected_tensors
from tests.support.tiny_models import Runner, make_checkpoint, make_config

# float32 sums in another order; logits are about 3. Measured: 3e-6.
TOLERANCE = 2e-5


def make_model(architecture: str, dtype: str = "float32", quantization: str = "none") -> DecoderModel:
    config = make_config(architecture, hidden_size=64, head_dim=16, tie_word_embeddings=True)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.15 + (1.0 if "norm" in name else 0.0)
        for name, shape in expected_tensors(config).items()
    }
    return load_model(make_checkpoint(config, tensors), device="cpu", dtype=dtype, quantization=quantization)


@pytest.fixture(params=["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def model(request: pytest.FixtureRequest) -> DecoderModel:
    return make_model(request.param)


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("size", [2, 5, 16, 31])
def test_chunked_is_whole(model: DecoderModel, tokens: list[int], size: int) -> None:
    whole = Runner(model).whole(tokens)
    runner = Runner(model)
    table = runner.table(tokens)
    parts = [runner.step([(tokens[i : i + size], i, table)])[0] for i in range(0, len(tokens), size)]
    assert difference(torch.cat(parts), whole) < TOLERANCE


def test_decoded_is_prefilled(model: DecoderModel, tokens: list[int]) -> None:
    whole = Runner(model).whole(tokens)
    runner = Runner(model)
    table = runner.table(tokens)
    one_by_one = [runner.step([([token], i, table)])[0] for i, token in enumerate(tokens)]
    assert difference(torch.cat(one_by_one), whole) < TOLERANCE


def test_batched_is_alone(model: DecoderModel, tokens: list[int]) -> None:
    """Decode rows of several lengths, a chunk and a whole prompt in one step."""
    whole = Runner(model).whole(tokens)
    runner = Runner(model)
    starts = [36, 3, 16, 20]
    tables = [runner.table(tokens, 4 * row) for row in range(5)]
    for start, table in zip(starts, tables, strict=False):
        runner.step([(tokens[:start], 0, table)])
    work = [([tokens[start]], start, table) for start, table in zip(starts[:3], tables, strict=False)]
    work += [(tokens[20:30], 20, tables[3]), (tokens, 0, tables[4])]
    decoded = runner.step(work)
    for start, logits in zip(starts[:3], decoded, strict=False):
        assert difference(logits, whole[start : start + 1]) < TOLERANCE
    assert difference(decoded[3], whole[20:30]) < TOLERANCE
    assert difference(decoded[4], whole) < TOLERANCE


def test_only_rows_that_sample_are_finished(model: DecoderModel, tokens: list[int]) -> None:
    runner = Runner(model)
    whole = runner.whole(tokens)
    segment = Segment(runner.table(tokens), 0, len(tokens))
    ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
    for rows in ([], [36], [0, 7, 36]):
        context = AttentionContext.build(runner.pool, [segment])
        hidden = model.forward(ids, positions, context, torch.tensor(rows, dtype=torch.int64))
        assert hidden.shape == (len(rows), 64)
        logits = model.logits(hidden)
        assert logits.shape == (len(rows), 211)
        assert logits.dtype == torch.float32
        assert not rows or difference(logits, whole[rows]) < TOLERANCE


@pytest.mark.parametrize("quantization", ["none", "packed"])
def test_bfloat16_stays_near_float32(tokens: list[int], quantization: str) -> None:
    exact = Runner(make_model("LlamaForCausalLM")).whole(tokens).log_softmax(-1)
    half = Runner(make_model("LlamaForCausalLM", "bfloat16", quantization)).whole(tokens).log_softmax(-1)
    assert (exact.exp() * (exact - half)).sum(-1).mean() < 2e-3


def test_leading_logits_are_not_rounded_to_bfloat16(tokens: list[int]) -> None:
    model = make_model("LlamaForCausalLM", "bfloat16")
    logits = Runner(model).whole(tokens)
    leading = logits.topk(8).values
    assert not torch.equal(leading, leading.bfloat16().float())
