"""Rows that are held to something, in the CPU's lane: what is made for the next step when a step's result is out."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest

from firsttoken.core.grammar import Grammar
from firsttoken.core.plan import RowWork, StepPlan
from firsttoken.core.sampling_params import SamplingParams
from tests.executor.test_copies import PROMPT, make, start
from tests.support.tiny_models import make_config

VOCAB = make_config("LlamaForCausalLM").vocab_size
HELD = SamplingParams(temperature=0, max_tokens=50, grammar=Grammar("json_object"))


class Row:
    """Allows everything; `prepare` waits until it may go on, then fails if it is to."""

    may_refuse = False

    def __init__(self) -> None:
        self.go_on, self.fails = threading.Event(), False

    def mask(self):
        return np.full(-(-VOCAB // 32), -1, dtype=np.int32)

    def take(self, token):
        return True

    def prepare(self):
        assert self.go_on.wait(5)
        if self.fails:
            raise RuntimeError("it cannot be made")


@pytest.fixture
def lane():
    executor, _ = make("torch")
    row = Row()
    executor.hold_to(type("Rows", (), {"row": lambda self, start: row})())
    yield executor, row
    row.go_on.set()
    executor.close()


def first_step(executor):
    begun = msgspec.structs.replace(start(0, PROMPT, [1, 2, 3]), params=HELD)
    return executor.submit(StepPlan(step_id=1, starts=[begun], work=[RowWork(0, 0, len(PROMPT), True)]))


def next_step(executor):
    return executor.submit(StepPlan(step_id=2, work=[RowWork(0, len(PROMPT), 1, True)]))


def test_the_result_does_not_wait_for_the_next_mask_and_the_next_step_does(lane):
    executor, row = lane
    assert first_step(executor).result(5).samples[0].error is None
    following = next_step(executor)
    with pytest.raises(TimeoutError):
        following.result(0.1)
    row.go_on.set()
    assert following.result(5).samples[0].error is None


def test_what_fails_between_two_steps_fails_the_next(lane):
    executor, row = lane
    row.fails = True
    assert first_step(executor).result(5).samples[0].error is None
    row.go_on.set()
    with pytest.raises(RuntimeError, match="it cannot be made"):
        next_step(executor).result(5)
