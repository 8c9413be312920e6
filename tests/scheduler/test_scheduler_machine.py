"""Any sequence of add, plan, complete, abort, preempt and time, with classes, under pools that are too small."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from firsttoken.core.clock import NS_PER_MS
from firsttoken.core.errors import InvalidRequest
from firsttoken.core.request import Request, Status
from firsttoken.core.service import ClassTargets, Targets
from firsttoken.scheduler import PromptOrder

# Few different tokens and shared beginnings, so that prefixes meet.
PROMPTS = st.builds(
    lambda begin, end: begin + end,
    st.sampled_from([[], [1] * 4, [1] * 8, [1, 2, 3, 4, 1, 2, 3, 4]]),
    st.lists(st.integers(0, 4), min_size=1, max_size=9),
)


AGEING = Targets(p1=ClassTargets(starts_within=400), p2=ClassTargets(starts_within=100))
NEVER = Targets(p1=ClassTargets(starts_within=1e12), p2=ClassTargets(starts_within=1e12))


def machine_of(world: Any, clock: Any) -> type[RuleBasedStateMachine]:
    class SchedulerMachine(RuleBasedStateMachine):
        @initialize(
            blocks=st.integers(5, 30),
            slots=st.integers(1, 4),
            alone=st.integers(1, 12),
            mixed=st.integers(1, 6),
            max_passes=st.integers(0, 3),
            watermark=st.sampled_from([0.0, 0.2]),
            caching=st.booleans(),
            ageing=st.booleans(),
            tick_ns=st.sampled_from([0, 1000]),
            order=st.sampled_from([PromptOrder(), PromptOrder(), PromptOrder(0), PromptOrder(0, decodes_wait=True)]),
        )
        def start(
            self,
            blocks: int,
            slots: int,
            alone: int,
            mixed: int,
            max_passes: int,
            watermark: float,
            caching: bool,
            ageing: bool,
            tick_ns: int,
            order: Any,
        ) -> None:
            clock.tick_ns = tick_ns
            self.strict = not ageing and not caching
            self.world = world(
                blocks=blocks,
                slots=slots,
                alone=alone,
                mixed=min(mixed, alone),
                max_model_len=30,
                cache_options={"prefix_caching": caching},
                options={"max_passes": max_passes, "watermark": watermark},
                order=order,
                targets=AGEING if ageing else NEVER,
            )

        @rule(
            prompt=PROMPTS,
            max_tokens=st.integers(1, 12),
            service=st.integers(0, 2),
            priority=st.integers(-1, 1),
            tenant=st.sampled_from("abc"),
            share=st.sampled_from([0.5, 1.0, 3.0]),
            time_left=st.sampled_from([None] * 5 + [0, 30]),
            stops=st.sampled_from([(), (0,), (1, 3)]),
            min_tokens=st.integers(0, 2),
            fails=st.sampled_from([False] * 9 + [True]),
        )
        def add(
            self,
            prompt: list[int],
            max_tokens: int,
            service: int,
            priority: int,
            tenant: str,
            share: float,
            time_left: int | None,
            stops: tuple[int, ...],
            min_tokens: int,
            fails: bool,
        ) -> None:
            fields: dict[str, Any] = {
                "service": service,
                "priority": priority,
                "tenant": tenant,
                "share": share,
                "stop_ids": stops,
                "min_tokens": min(min_tokens, max_tokens),
                "deadline_ns": 0 if time_left is None else clock.read() + time_left * NS_PER_MS,
            }
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
            late = [r for r in self.world.requests.values() if r.deadline_ns and r.deadline_ns <= clock.read()]
            late = [request for request in late if not request.first_scheduled]
            waited = {n for n, r in self.world.requests.items() if r.status is Status.WAITING}
            planned = self.world.plan()
            assert all(request.status is Status.FINISHED for request in late), "too late, and not told"
            if planned is not None and self.strict:
                for start in planned.plan.starts:
                    self.check_nobody_better_was_refused(self.world.requests[start.request_id], waited)

        def check_nobody_better_was_refused(self, started: Request, waited: set[int]) -> None:
            """In the place of one that started no request of a better class would have fitted that waits still: to its
            end, beside all that run, however long they get."""
            kv, scheduler = self.world.kv, self.world.scheduler
            reserve = int(scheduler.config.watermark * kv.num_blocks)
            running = [r for r in self.world.requests.values() if r.status is Status.RUNNING and r is not started]
            for number in waited:
                other = self.world.requests[number]
                if other.status is Status.WAITING and other.service < started.service:
                    blocks = sum(kv.blocks_for(each.num_prompt + each.max_tokens) for each in [*running, other])
                    assert blocks + reserve > kv.num_blocks, f"{other} was refused for {started}"

        @rule(ms=st.sampled_from([1, 10, 50, 200]))
        def wait(self, ms: int) -> None:
            clock.ms += ms

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
            self.world.scheduler.preempt(request.request_id)
            self.world.check()

        def teardown(self) -> None:
            if hasattr(self, "world"):
                for _ in range(20):  # time passes while there are steps, so that all comes back that stays out
                    self.world.step()
                    clock.ms += 20
                self.world.drain(depth=2)

    return SchedulerMachine


@pytest.mark.timeout(100)
def test_any_sequence_keeps_every_token_and_every_block_and_the_order_of_classes(world: Any, clock: Any) -> None:
    run_state_machine_as_test(
        machine_of(world, clock), settings=settings(max_examples=100, stateful_step_count=40, deadline=None)
    )
