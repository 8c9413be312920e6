"""Rows that are held to something, in the executor with graphs: masks of the step before, and tokens taken back."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from firsttoken.core.errors import ConstraintFailed
from firsttoken.core.grammar import Grammar
from firsttoken.core.plan import RowWork
from firsttoken.core.sampling_params import SamplingParams
from tests.executor.test_graph_executor import Driver, make_executor, make_weights, prompt

VOCAB = 211


class Script:
    """A constraint by hand: after the token of each round of ``sets`` only the next set is allowed; ``refused`` tokens
    are taken back."""

    def __init__(self, sets, refused=(), fails_at=None) -> None:
        self.sets, self.refused, self.fails_at = list(sets), set(refused), fails_at
        self.taken: list[int] = []

    def mask(self):
        if len(self.taken) == self.fails_at:
            raise ConstraintFailed("nothing may come here")
        words = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
        for token in self.sets[len(self.taken)]:
            words[token // 32] |= np.uint32(1 << (token % 32))
        return words.view(np.int32)

    def take(self, token):
        assert token in self.sets[len(self.taken)]
        if token in self.refused:
            return False
        self.taken.append(token)
        return True

    def take_way_out(self):
        token = min(set(self.sets[len(self.taken)]) - self.refused)
        self.take(token)
        return token

    @property
    def may_refuse(self):
        return bool(self.refused)


class Scripts:
    def __init__(self, scripts) -> None:
        self.scripts = scripts

    def row_beside(self, start):
        return self.scripts[start.slot]

    def begin_masks(self) -> None:
        pass


@pytest.fixture(scope="module")
def checkpoint():
    return make_weights("LlamaForCausalLM")


HELD = SamplingParams(temperature=0, max_tokens=50, grammar=Grammar("json_object"))
FREE = SamplingParams(temperature=0, max_tokens=50)


def run(checkpoint, scripts, steps, *, ahead):
    """Tokens and errors of slots 0 (held by ``scripts``) and 1 (free), ``ahead`` steps launched before one is read."""
    driver = Driver(make_executor(checkpoint))
    driver.executor.hold_to(Scripts(scripts))
    row, start = driver.start(0, prompt(9, 1), HELD)
    other, second = driver.start(1, prompt(12, 2), FREE)
    start = msgspec.structs.replace(start, stop_ids=(3,))
    flying = [driver.submit([RowWork(0, 0, 9, True), RowWork(1, 0, 12, True)], [start, second])]
    samples = []
    for step in range(1, steps):
        if len(flying) > ahead:
            samples.append(flying.pop(0).result().samples)
        blocks = driver.grow(row, 8 + step) + driver.grow(other, 11 + step)
        flying.append(driver.submit([RowWork(0, 8 + step, 1, True), RowWork(1, 11 + step, 1, True)], blocks=blocks))
    samples += [step.result().samples for step in flying]
    driver.executor.close()
    return [[(sample.token, sample.error) for sample in step] for step in zip(*samples, strict=True)]


def test_each_step_is_held_to_the_mask_after_the_token_before_and_refusals_are_chosen_again(checkpoint):
    everything = set(range(VOCAB))
    (alone, free) = run(checkpoint, {0: Script([everything] * 3)}, 3, ahead=1)
    first = alone[0][0]
    sets = [everything, {30, 210}, {7, 8, 9, 10, 11, 12}]
    script = Script(sets, refused={first, *range(7, 12)})  # more of them than it is asked again for
    held, same = run(checkpoint, {0: script}, 3, ahead=1)
    assert [token for token, _ in held] == script.taken
    assert script.taken[0] != first
    assert script.taken[1] in sets[1]
    assert script.taken[2] == 12
    assert same == free  # what its neighbour is held to is nothing to it, and it was chosen for once more each time


def test_masks_come_in_time_where_no_step_is_ahead(checkpoint):
    held, _ = run(checkpoint, {0: Script([{10, 20}, {30}])}, 2, ahead=0)
    assert held[0][0] in {10, 20}
    assert held[1] == (30, None)


def test_a_step_tells_where_its_host_was_when_it_held_rows(checkpoint):
    driver = Driver(make_executor(checkpoint))
    driver.executor.hold_to(Scripts({0: Script([{5}])}))
    _, start = driver.start(0, prompt(9, 1), HELD)
    times = driver.submit([RowWork(0, 0, 9, True)], [start]).result().held
    assert times is not None
    assert min(times.mask_ns, times.upload_ns, times.launch_ns, times.take_ns) > 0
    _, start = driver.start(1, prompt(9, 1), FREE)
    assert driver.submit([RowWork(1, 0, 9, True)], [start]).result().held is None
    driver.executor.close()


def test_one_that_cannot_go_on_ends_with_its_reason_and_no_other_does(checkpoint):
    held, free = run(checkpoint, {0: Script([{5}, {6}], fails_at=1)}, 2, ahead=1)
    assert held[0] == (5, None)
    assert held[1] == (0, "nothing may come here")
    assert all(error is None for _, error in free)
