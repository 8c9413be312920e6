"""Batched = alone, cached = uncached, chunked = whole, preempted = not: token by token, in unpacked float32.

Run through the whole engine (loop, scheduler, KV cache, executor, model, sampler) on the channel, without text.
"""

from __future__ import annotations

import random

import pytest

from firsttoken.core.sampling_params import SamplingParams
from tests.support.real_engine import Engine


@pytest.fixture
def start():
    engines = []

    def make(model, **args):
        engines.append(Engine(model, **args))
        return engines[-1]

    yield make
    for engine in engines:
        engine.stop()


MODELS = ["random:tiny-llama", "random:tiny-qwen2", "random:tiny-qwen3"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
RANDOM = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=12, repetition_penalty=1.1, frequency_penalty=0.2)


def make_prompts(vocab, count=8, seed=0, longest=90):
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_batched_is_alone(start, model, params):
    engine = start(model, prefix_caching=False)
    prompts = make_prompts(engine.info.vocab_size)
    alone, _ = engine.run(prompts, params, together=False)
    # The seed belongs to the prompt's number, so the same draws are expected in company.
    together, _ = engine.run(prompts, params)
    assert together == alone


@pytest.mark.parametrize("model", MODELS)
def test_cached_is_uncached(start, model):
    engine = start(model)
    prompts = make_prompts(engine.info.vocab_size, longest=150)
    cold, first = engine.run(prompts, GREEDY)
    warm, second = engine.run(prompts, GREEDY)
    assert warm == cold
    assert sum(delta.cached_tokens for delta in first) == 0
    assert [delta.cached_tokens for delta in second] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("depth", [1, 2])
def test_chunked_is_whole(start, model, depth):
    whole = start(model, prefix_caching=False)
    chunked = start(model, prefix_caching=False, prefill_tokens=7, mixed_prefill_tokens=5, in_flight=depth)
    prompts = make_prompts(whole.info.vocab_size)
    assert chunked.run(prompts, GREEDY)[0] == whole.run(prompts, GREEDY)[0]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_preempted_is_not(start, model, depth, params):
    params = params.replace(max_tokens=60)
    roomy = start(model)
    bytes_per_block = roomy.info.bytes_per_block
    tight = start(model, kv_memory=16 * bytes_per_block, max_model_len=160, in_flight=depth)
    prompts = make_prompts(roomy.info.vocab_size, count=6)
    expected, _ = roomy.run(prompts, params)
    got, last = tight.run(prompts, params)
    assert tight.stats.preemptions >= 1
    assert [delta.finish_reason for delta in last] == ["length"] * 6
    assert got == expected
    assert (tight.stats.running, tight.stats.waiting, tight.stats.kv_used) == (0, 0, 0)


def test_the_seed_decides_and_not_the_row(start):
    engine = start("random:tiny-llama")
    prompts = make_prompts(engine.info.vocab_size, count=4)
    first, _ = engine.run(prompts, RANDOM)
    second, _ = engine.run(prompts, RANDOM)
    assert first == second
    other, _ = engine.run([prompts[1], prompts[0]], RANDOM)
    assert other != [first[1], first[0]]  # other seeds
