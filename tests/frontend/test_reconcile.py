"""Whatever mix of requests comes and however they end: each answer that was started is counted once when it ends, the
records tell the same, and no token is in a record that the engine has not counted."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.core.errors import FirstTokenError
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.engine.stub import Fault, StubConfig, StubEngine
from firsttoken.frontend.async_llm import AsyncLLM
from firsttoken.observability.account import STAGES
from tests.support.byte_tokenizer import EOS, GENERATION, VOCAB_SIZE
from tests.support.stub_llm import settle

OUTCOMES = ("finished", "aborted", "refused", "expired", "failed")
ENDS = ("length", "end token", "stop string", "leaves", "fault", "too large", "late")


@dataclass(frozen=True)
class Asked:
    """``tokens`` are wanted; the end comes after ``after`` of them where it does not come by itself."""

    end: str
    tokens: int
    after: int
    n: int


REQUESTS = st.lists(
    st.builds(Asked, st.sampled_from(ENDS), st.integers(2, 12), st.integers(0, 1), st.integers(1, 3)),
    min_size=1,
    max_size=8,
)


def script(request):
    first = request.prompt[0]  # a request's end is told by its prompt
    count = request.max_tokens
    if ENDS[first] == "fault":
        return [97] * (count // 2) + [Fault("boom")]
    if ENDS[first] == "end token":
        return [97] * (count // 2) + [EOS]
    if ENDS[first] == "stop string":
        return [97] * (count // 2) + [88] * count
    return [97] * count


async def run(llm: AsyncLLM, number: int, asked: Asked) -> None:
    params = SamplingParams(
        max_tokens=300 if asked.end == "too large" else asked.tokens,
        n=asked.n,
        stop="X" if asked.end == "stop string" else None,
    )
    stream = llm.generate(
        {"prompt_token_ids": [ENDS.index(asked.end), 1]},
        params,
        f"r{number}",
        deadline_ms=0.001 if asked.end == "late" else None,
    )
    seen = 0
    with contextlib.suppress(FirstTokenError):
        async with contextlib.aclosing(stream):
            async for _ in stream:
                seen += 1
                if asked.end == "leaves" and seen > asked.after:
                    break


async def check(tokenizer, requests: list[Asked]) -> None:
    engine = StubEngine(script, StubConfig(vocab_size=VOCAB_SIZE), step_s=0.0003, max_num_seqs=4, kv_blocks=16)
    llm = AsyncLLM(engine, tokenizer=tokenizer, generation_config=GENERATION, seed=0)
    await llm.start()
    try:
        await asyncio.gather(*(run(llm, number, asked) for number, asked in enumerate(requests)))
        async with asyncio.timeout(5):  # the engine has to say its last word of those who left
            while len(llm.recent) < len(requests):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        await settle(llm, running=0, waiting=0)
        reconcile(llm, requests)
    finally:
        await llm.shutdown()


def reconcile(llm: AsyncLLM, requests: list[Asked]) -> None:
    value = llm.metrics.registry.get_sample_value
    ended = {
        name: value("firsttoken_requests_ended_total", {"outcome": name, "service_class": "p2"}) for name in OUTCOMES
    }
    answers = sum(asked.n for asked in requests)
    assert value("firsttoken_requests_started_total", {"service_class": "p2"}) == sum(ended.values()) == answers
    records = {one.id: one for one in llm.recent.latest(100)}
    assert len(records) == len(requests)
    for outcome in OUTCOMES:
        counted = sum(asked.n for number, asked in enumerate(requests) if records[f"r{number}"].outcome == outcome)
        if outcome in ("finished", "expired"):  # of one that fails or leaves, some answers may have finished before
            assert ended[outcome] >= counted
        else:
            assert ended[outcome] <= counted
    told = sum(one.output_tokens for one in records.values())
    made = llm.stats.output_tokens
    assert told <= made
    if all(asked.end in ("length", "end token") for asked in requests):
        assert told == made
    for one in records.values():
        account = one.account
        assert abs(sum(account[stage] for stage in STAGES) - account["total_ms"]) < 1e-6
        assert min(account[stage] for stage in STAGES) >= 0
        assert account["unaccounted_ms"] < max(1, 0.02 * account["total_ms"]), (one.outcome, one.timeline)


@settings(max_examples=40, deadline=None)
@pytest.mark.clock
@given(requests=REQUESTS)
def test_counts_records_and_tokens_agree(tokenizer, requests: list[Asked]):
    asyncio.run(check(tokenizer, requests))
