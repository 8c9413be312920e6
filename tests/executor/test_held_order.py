"""When what is launched of steps that hold rows: the forward pass as soon as there is a plan, the choice of tokens when
the ones before are known. The model computes nothing, so it costs no kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from firsttoken.core.grammar import Grammar
from firsttoken.core.plan import RowStart, RowWork, StepPlan
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.executor.graphs import choice as choice_module
from tests.executor.test_graph_ring import make, no_kernels  # noqa: F401

HELD = SamplingParams(temperature=0, grammar=Grammar("json_object"))
FREE = SamplingParams(temperature=0)


class Row:
    """Allows everything, and notes when it is asked what."""

    may_refuse = False

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def mask(self) -> np.ndarray:
        self._log.append("mask")
        return np.full(4, -1, dtype=np.int32)

    def take(self, token: int) -> bool:
        self._log.append("take")
        return True


class Rows:
    """The grammars of an engine of which every one is such a row's."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def row_beside(self, start: RowStart) -> Row:
        return Row(self._log)

    def begin_masks(self) -> None:
        pass


class Machine:
    """An executor whose ``log`` says "forward", "mask", "end" (the choice was launched to its end) and "take". Row 0 is
    held, row 1, where there is one, is free."""

    def __init__(self, open_executor: Any, rows: int = 1) -> None:
        self.log: list[str] = []
        self.executor, self.model, self.runtime = open_executor()
        self.executor.hold_to(Rows(self.log))
        self._rows = rows
        self._steps = 0
        self._note(self.model, "forward", "forward")
        self._note(self.executor._results, "send", "end")

    def _note(self, owner: Any, name: str, word: str) -> None:
        call = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: (self.log.append(word), call(*args, **kwargs))[1])

    def submit(self) -> Any:
        """The next step."""
        step, self._steps = self._steps, self._steps + 1
        prompt = np.arange(1, 4, dtype="<u4").tobytes()
        starts = [RowStart(slot, slot, prompt, 3, FREE if slot else HELD, 0, [slot + 1]) for slot in range(self._rows)]
        work = [RowWork(slot, 2 + step if step else 0, 1 if step else 3, True) for slot in range(self._rows)]
        return self.executor.submit(StepPlan(step, work, [] if step else starts))

    def take_log(self) -> list[str]:
        said, self.log[:] = list(self.log), []
        return said


@pytest.mark.parametrize("rows", [1, 2])
def test_the_next_forward_pass_waits_for_no_token_and_a_result_for_no_mask(make, rows):  # noqa: F811
    machine = Machine(make, rows)
    before = machine.submit()
    assert machine.take_log() == ["forward"]
    for _ in range(4):
        flying = machine.submit()
        said = machine.take_log()
        assert said[-1] == "forward"
        assert "take" not in said, "it was launched before the token that it begins with was known"
        assert len(before.result().samples) == rows
        assert machine.take_log() == ["take"], "what a step brought could not be told before the next one's mask"
        assert not flying.done()
        machine.executor.settle()
        assert machine.take_log() == ["mask", "end"]
        before = flying


def test_what_is_still_to_be_launched_comes_before_all_that_follows_it(make):  # noqa: F811
    machine = Machine(make)
    first, second, third = machine.submit(), machine.submit(), machine.submit()
    assert machine.take_log() == ["forward", "mask", "end", "forward", "take", "mask", "end", "forward"]
    assert third.result().step_id == 2
    assert machine.take_log() == ["take", "mask", "end", "take"]
    assert (first.result().step_id, second.result().step_id, machine.take_log()) == (0, 1, [])
    machine.submit()
    machine.executor.close()
    assert machine.take_log() == ["forward", "mask", "end", "take"]


def test_a_choice_is_one_launch_once_it_has_been_made_twice(make, monkeypatch):  # noqa: F811
    machine = Machine(make)
    executor, runtime = machine.executor, machine.runtime
    executor.capture(executor.table.shape(1, [], 0), None)
    machine.submit().result()
    streams = []
    for _ in range(4):
        before = runtime.streams
        step = machine.submit()
        executor.settle()
        streams.append(runtime.streams - before)
        assert step.result().captured
    assert streams[0] > 0
    assert streams[1] > 0
    assert streams[2:] == [1, 1], "this device replays a graph by running it again, which enters the stream"


def test_what_a_captured_step_reads_is_not_made_again(make, monkeypatch):  # noqa: F811
    """Its views take the host as long as a launch."""
    machine = Machine(make)
    executor, made = machine.executor, []
    executor.capture(executor.table.shape(1, [], 0), None)
    for _ in range(3):
        machine.submit().result()
    view = executor._view
    monkeypatch.setattr(executor, "_view", lambda shape: made.append(shape) or view(shape))
    assert machine.submit().result().captured
    assert len(made) == 1, "this device makes them when it runs a graph again"


def test_a_choice_that_cannot_be_captured_goes_on_by_kernels(make, caplog):  # noqa: F811
    machine = Machine(make)
    executor, runtime = machine.executor, machine.runtime
    executor.capture(executor.table.shape(1, [], 0), None)
    machine.submit().result()
    machine.submit().result()
    runtime.failures.append(RuntimeError("no such thing in a graph"))
    for _ in range(3):
        assert machine.submit().result().captured
    assert not runtime.failures
    assert [record.name for record in caplog.records] == [choice_module.__name__]
    machine.take_log()
    machine.submit().result()
    assert machine.take_log() == ["forward", "mask", "end", "take"]


def test_a_choice_that_fails_has_no_result_and_is_tried_no_more(make):  # noqa: F811
    machine = Machine(make)
    machine.submit()
    machine.executor._sampler.set_masks = lambda masks: 1 / 0
    with pytest.raises(ZeroDivisionError):
        machine.executor.settle()
    machine.executor.settle()
    machine.executor.close()
