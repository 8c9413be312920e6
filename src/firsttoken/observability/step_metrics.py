"""Series made of the engine's step records, some times a second, in the process that serves ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from firsttoken.core.clock import NS_PER_S
from firsttoken.core.step_record import StepRecord
from firsttoken.observability.histogram import Histogram, Histograms

# Seconds, from a small model's decode step on a GPU to a prompt's on a CPU.
# fmt: off
STEP_BUCKETS = (0.0002, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075,
                0.1, 0.2, 0.5, 1, 2)
# fmt: on
STEP_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass
class _Totals:
    """Running sums; times in ns."""

    decode_tokens: int = 0
    prefill_tokens: int = 0
    pad_tokens: int = 0
    plan: int = 0
    wait: int = 0
    compute: int = 0
    harvest: int = 0
    gc: int = 0
    run_queue: int = 0
    copy: int = 0
    copied_in: int = 0
    copied_out: int = 0


class StepMetrics(Collector):
    """What steps tell. One thread adds, any may collect."""

    def __init__(self) -> None:
        self._times = Histograms(
            "firsttoken_step_seconds", "Time that a step computed, by what was in it (s)", ["kind"], STEP_BUCKETS
        )
        # By the three kinds there are, so that a dashboard finds them before the first step.
        self._by_kind = {kind: self._times.of(kind) for kind in ("decode", "mixed", "prefill")}
        self.tokens = Histogram(STEP_TOKEN_BUCKETS)
        self._totals = _Totals()

    def add(self, records: Sequence[StepRecord]) -> None:
        """Take records over, each once. About a microsecond each."""
        sums = self._totals
        for step in records:
            kind = "prefill" if not step.decode_rows else "mixed" if step.prefill_tokens else "decode"
            self._by_kind[kind].observe((step.ended_ns - step.started_ns) / NS_PER_S)
            self.tokens.observe(step.decode_rows + step.prefill_tokens)
            sums.decode_tokens += step.decode_rows
            sums.prefill_tokens += step.prefill_tokens
            sums.pad_tokens += step.pad_tokens
            sums.plan += step.submitted_ns - step.planned_ns
            sums.wait += max(step.started_ns - step.submitted_ns, 0)
            sums.compute += step.ended_ns - step.started_ns
            sums.harvest += max(step.harvested_ns - step.ended_ns, 0)
            sums.gc += step.gc_ns
            sums.run_queue += step.run_queue_ns
            sums.copy += step.copy_ns
            sums.copied_in += step.copied_bytes_in
            sums.copied_out += step.copied_bytes_out

    def collect(self) -> Iterator[Metric]:
        sums = self._totals
        yield self._times.family()
        yield _by(
            "step_tokens",
            "Tokens that steps computed; padding is what a captured shape was filled up with",
            "kind",
            {"decode": sums.decode_tokens, "prefill": sums.prefill_tokens, "padding": sums.pad_tokens},
        )
        parts = {
            "plan": sums.plan,
            "wait": sums.wait,
            "compute": sums.compute,
            "harvest": sums.harvest,
            "gc": sums.gc,
            "run_queue": sums.run_queue,
            "copy": sums.copy,
        }
        yield _by(
            "step_part_seconds",
            "Time of steps by part (s): plan, wait (for the device), compute and harvest follow one another; garbage "
            "collection, the wait for a processor and KV copies are within or beside them",
            "part",
            {part: ns / NS_PER_S for part, ns in parts.items()},
        )
        yield _by(
            "kv_copied_bytes",
            "Bytes of KV copied between the device and host memory",
            "direction",
            {"in": sums.copied_in, "out": sums.copied_out},
        )


def _by(name: str, text: str, label: str, values: dict[str, float]) -> Metric:
    family = CounterMetricFamily(f"firsttoken_{name}", text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
