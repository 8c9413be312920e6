"""The second segment of a step: its tokens are chosen from the logits and sent to the host.

Where rows are held to grammars it comes apart from the first: the host launches the forward pass as soon as there is a
plan, and the choice once it knows the tokens before and has the masks after them (`held`). Choices that need nothing
but masks, and random numbers perhaps, have graphs: to launch their kernels one by one takes the host longer than all
else of such a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from firsttoken.executor.graphs.captures import Graph
from firsttoken.executor.graphs.results import ResultRing
from firsttoken.executor.graphs.runtime import Runtime
from firsttoken.models.step_view import Logits, StepView
from firsttoken.sampling.device.params import Needs
from firsttoken.sampling.device.sampler import DeviceSampler

# What a graph of the choice may hold. Lists of edits may be moved, and log-probabilities are asked for together with
# masks too seldom.
_CAPTURED = (Needs.MASKS | Needs.RANDOM | Needs.SEARCH).value

log = logging.getLogger(__name__)

Replay = Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """The first segment of a step as the second sees it; ``graph`` is the model's, where it was launched by one."""

    view: StepView
    logits: Logits | None
    needs: Needs
    graph: Graph | None = None


class Chooser:
    """Launches choices by ``sampler`` into ``results``. Kernels are launched inside of ``working``."""

    def __init__(
        self,
        sampler: DeviceSampler,
        results: ResultRing,
        runtime: Runtime,
        working: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._sampler = sampler
        self._results = results
        self._runtime = runtime
        self._working = working

    def choose(self, step: Launched, *, pdl: bool) -> None:
        """Launch what chooses tokens, where there is something to choose them from, and what ends the step. The caller
        is `working`; ``pdl``: what was launched before is the step's own and lets this begin early."""
        self._sample(step, pdl=pdl)
        self._results.send(step.needs, pdl=pdl)

    # ------------------------------------------------------------------ apart from the first segment

    @property
    def vocab_size(self) -> int:
        return self._sampler.vocab_size

    def set_masks(self, masks: NDArray[np.int32]) -> None:
        """Those of the choice that is launched next; the one before must have ended (`DeviceSampler.set_masks`)."""
        self._sampler.set_masks(masks)

    def choose_apart(self, step: Launched) -> None:
        """As `choose`; a choice of its kind that was launched before is captured, and is one launch from then on."""
        graph, needs = step.graph, step.needs.value
        if graph is None or needs & ~_CAPTURED:
            self._choose_by_kernels(step)
        elif needs not in graph.choices:
            graph.choices[needs] = None  # all its kernels are loaded now
            self._choose_by_kernels(step)
        else:
            replay = graph.choices[needs]
            if replay is None:
                replay = graph.choices[needs] = self._made(step, graph)
            replay()

    def try_choice(self, step: Launched, rows: int) -> tuple[list[int], list[int]]:
        """The tokens and errors of the first ``rows``, which are waited for. They may be chosen again; `end` ends the
        step."""
        with self._working():
            self._sample(step, pdl=False)
            return self._results.outputs.tokens[:rows].tolist(), self._results.outputs.errors[:rows].tolist()

    def end(self, step: Launched) -> None:
        with self._working():
            self._results.send(step.needs, pdl=False)

    def _made(self, step: Launched, graph: Graph) -> Replay:
        """The graph of such a choice; where it cannot be captured, what launches its kernels."""

        def choose() -> None:
            self._choose_by_kernels(Launched(step.view, graph.logits(), step.needs))

        try:
            return self._runtime.capture(choose)
        except Exception:
            self._runtime.synchronize()  # raises if the device has failed
            log.exception("the choice of held rows' tokens is not captured, it runs by kernels")
            return choose

    def _choose_by_kernels(self, step: Launched) -> None:
        with self._working():
            self.choose(step, pdl=False)

    def _sample(self, step: Launched, *, pdl: bool) -> None:
        if step.logits is None:
            return
        view = step.view
        self._sampler.sample(
            step.logits.values,
            view.sample_slots,
            view.sample_positions,
            view.tokens,
            self._results.outputs,
            needs=step.needs,
            best=step.logits.best,
            pdl=pdl,
        )
