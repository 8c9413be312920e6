"""Any sequence of add, plan, complete, abort and preempt, under pools that are too small."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from firsttoken.core.errors import InvalidRequest
from firsttoken.core.request import Status

# Few different tokens and shared beginnings, so that prefixes meet.
PROMPTS = st.builds(
    lambda begin, end: begin + end,
    st.sampled_from([[], [1] * 4, [1] * 8, [1, 2, 3, 4, 1, 2, 3, 4]]),
    st.lists(st.integers(0, 4), min_size=1, max_size=9),
)


def machine_of(world: Any) -> type[RuleBasedStateMachine]:
    class SchedulerMachine(RuleBasedStateMachine):
        @initialize(
            blocks=st.integers(5, 12),
            slots=st.integers(1, 4),
            alone=st.integers(1, 12),
            mixed=st.integers(1, 6),
            max_passes=st.integers(0, 3),
            watermark=st.sampled_from([0.0, 0.2]),
            caching=st.booleans(),
        )
        def start(
            self, blocks: int, slots: int, alone: int, mixed: int, max_passes: int, watermark: float, caching: bool
        ) -> None:
            self.world = world(
                blocks=blocks,
                slots=slots,
                alone=alone,
                mixed=mixed,
                max_model_len=30,
                cache_options={"prefix_caching": caching},
                options={"max_passes": max_passes, "watermark": watermark},
            )

        @rule(
            prompt=PROMPTS,
            max_tokens=st.integers(1, 12),
            priority=st.integers(0, 2),
            stops=st.sampled_from([(), (0,), (1, 3)]),
            min_tokens=st.integers(0, 2),
            fails=st.sampled_from([False] * 9 + [True]),
        )
        def add(
            self,
            prompt: list[int],
            max_tokens: int,
            priority: int,
            stops: tuple[int, ...],
            min_tokens: int,
            fails: bool,
        ) -> None:
            fields = {"priority": priority, "stop_ids": stops, "min_tokens": min(min_tokens, max_tokens)}
            if -(-(len(prompt) + max_tokens - 1) // 4) > self.world.blocks:
                with pytest.raises(InvalidRequest, match="KV blocks"):
                    self.world.add(prompt, max_tokens, **fields)
                return
            request = self.world.add(prompt, max_tokens, **fields)
            if fails:
                self.world.executor.failing.add(request.request_id)

        @precondition(lambda self: len(self.world.in_flight) < 3)
        @rule()
        def plan(self) -> None:
            self.world.plan()

        @precondition(lambda self: self.world.in_flight)
        @rule()
        def complete(self) -> None:
            self.world.complete()

        @precondition(lambda self: self.world.requests)
        @rule(data=st.data())
        def abort(self, data: st.DataObject) -> None:
            self.world.abort(data.draw(st.sampled_from(sorted(self.world.requests))))

        @precondition(lambda self: self.world.scheduler.num_running)
        @rule(data=st.data())
        def preempt(self, data: st.DataObject) -> None:
            running = [n for n, r in self.world.requests.items() if r.status is Status.RUNNING]
            request = self.world.requests[data.draw(st.sampled_from(running))]
            self.world.scheduler._preempt(request)
            self.world.check()

        def teardown(self) -> None:
            if hasattr(self, "world"):
                self.world.drain(depth=2)

    return SchedulerMachine


@pytest.mark.timeout(100)
def test_any_sequence_keeps_every_token_and_every_block(world: Any) -> None:
    run_state_machine_as_test(
        machine_of(world), settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )
