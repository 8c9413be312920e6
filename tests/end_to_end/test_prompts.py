"""What is asked of a prompt itself, its vector and its log-probabilities, against transformers, by whole engines."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from firsttoken.core.cache_miss import MissReason
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import ServiceClass
from firsttoken.transport.messages import Abort, Refused
from tests.support.hf_families import save_model
from tests.support.real_engine import Engine

TOLERANCE = 1e-4
POOL = SamplingParams(temperature=0, max_tokens=0)
SCORE = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=3)
VOCAB = 211


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    return path, save_model("qwen3", path)


@pytest.fixture(scope="module")
def engine(folder):
    """Steps of few tokens, so that every prompt comes in chunks."""
    made = Engine(str(folder[0]), prefill_tokens=24, mixed_prefill_tokens=16, in_flight=2, max_model_len=128)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def narrow(folder):
    """One request at a time."""
    made = Engine(str(folder[0]), max_num_seqs=1, max_model_len=128, prefill_tokens=8, mixed_prefill_tokens=8)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(5)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 2, 16, 17, 33, 64, 90, 128)]


@pytest.fixture(scope="module")
def states(folder, prompts):
    """Of each prompt the hidden states after the final norm, and the logits, ``[T, H]`` and ``[T, V]``."""
    with torch.no_grad():
        return [
            (out.hidden_states[-1][0], out.logits[0])
            for out in (folder[1](torch.tensor([prompt]), output_hidden_states=True) for prompt in prompts)
        ]


def vector(delta) -> torch.Tensor:
    return torch.tensor(array("f", delta.pooled).tolist())


@pytest.mark.parametrize("kind", ["mean", "last"])
@pytest.mark.parametrize("together", [True, False])
def test_a_vector_is_what_transformers_makes_of_the_prompt(engine, prompts, states, kind, together):
    tokens, last = engine.run(prompts, POOL, pooling=kind, together=together)
    assert tokens == [[]] * len(prompts)
    for delta, (hidden, _) in zip(last, states, strict=True):
        expected = hidden.mean(0) if kind == "mean" else hidden[-1]
        assert (delta.finish_reason, delta.prompt_logprobs) == ("stop", None)
        assert float((vector(delta) - expected).abs().max()) < TOLERANCE
    assert (engine.stats.running, engine.stats.waiting, engine.stats.kv_used) == (0, 0, 0)


def test_a_mean_looks_at_all_positions_and_says_so(engine, prompts):
    _, [mean, end] = engine.run([prompts[5]] * 2, POOL, pooling=["mean", "last"], together=False)
    assert (mean.cached_tokens, mean.miss.reason, mean.miss.position) == (0, MissReason.ALL_POSITIONS, 0)
    assert end.cached_tokens == 48  # what the first one computed is found by those who may use it
    assert end.miss is None


def test_log_probabilities_of_a_prompt_are_those_of_transformers(engine, prompts, states):
    params = [SCORE.replace(prompt_logprobs=index % 4) for index in range(len(prompts))]
    tokens, last = engine.run(prompts, params)
    assert tokens == [[]] * len(prompts)
    for index, (delta, (_, logits)) in enumerate(zip(last, states, strict=True)):
        assert delta.finish_reason == "length"
        entries = list(delta.prompt_logprobs.entries())
        expected = torch.log_softmax(logits, -1)
        assert len(entries) == len(prompts[index]) - 1
        for position, entry in enumerate(entries):
            row, target = expected[position], prompts[index][position + 1]
            assert abs(entry.logprob - float(row[target])) < TOLERANCE
            assert entry.rank == 1 + int((row > row[target]).sum())
            best = row.topk(index % 4)
            assert entry.top_ids == best.indices.tolist()
            assert torch.allclose(torch.tensor(entry.top_logprobs), best.values, atol=TOLERANCE)


def test_answers_are_the_same_with_the_prompts_log_probabilities(engine, prompts):
    plain = SamplingParams(temperature=0, max_tokens=6)
    some = [prompt[:100] for prompt in prompts]
    expected, _ = engine.run(some, plain)
    before = len(engine.prompt_logprobs)
    got, last = engine.run(
        some, [plain.replace(prompt_logprobs=2 if index % 2 else None) for index in range(len(some))]
    )
    assert got == expected
    assert len(engine.prompt_logprobs) == before + len(some) // 2
    assert [delta.miss.reason for delta in last[1::2]] == [MissReason.ALL_POSITIONS] * 4


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_who_was_preempted_gets_the_same_vector(narrow, prompts, states, kind):
    """In the midst of the prompt, by a request of a better class."""
    for _ in range(20):
        ids = narrow.submit([prompts[6]] * 4, POOL, pooling=kind, service=ServiceClass.P2, salt=str(narrow.next_id))
        narrow.wait(ids[:1])
        [better] = narrow.submit([prompts[3]], SCORE, service=ServiceClass.P0)
        pooled = [one for one in narrow.wait(ids) if one.preemptions]
        [scored] = narrow.wait([better])
        if pooled:
            break
    assert pooled
    hidden = states[6][0]
    expected = hidden.mean(0) if kind == "mean" else hidden[-1]
    assert float((vector(pooled[0]) - expected).abs().max()) < TOLERANCE
    assert len(list(scored.prompt_logprobs.entries())) == 16
    assert (narrow.stats.running, narrow.stats.waiting, narrow.stats.kv_used) == (0, 0, 0)


def test_what_can_never_fit_is_refused_and_the_whole_context_is_not(engine, prompts):
    _, [whole, longer] = engine.run([prompts[-1], [*prompts[-1], 1]], POOL, pooling="mean")
    assert len(whole.pooled) == 4 * 60
    assert isinstance(longer, Refused)
    assert "129 tokens" in longer.message
    assert "128" in longer.message


def test_an_abort_frees_what_a_prompt_holds(engine, prompts):
    ids = engine.submit([prompts[-1]] * 3, POOL, pooling="mean")
    engine.handle.client.send(Abort(ids))
    assert {delta.finish_reason for delta in engine.wait(ids)} <= {"abort", "stop"}
    engine.run([prompts[0]], POOL, pooling="mean")
    assert (engine.stats.running, engine.stats.waiting, engine.stats.kv_used) == (0, 0, 0)
