"""What an engine and the process that compiles for it say to each other: one JSON object a line. Torch-free."""

from __future__ import annotations

import msgspec

from firsttoken.checkpoint.model_config import ModelConfig
from firsttoken.executor.ahead.gpus import GPU
from firsttoken.executor.config import ExecutorConfig


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Compile what steps of this model need, with so many processes. ``quietly``: once the first answer's kernels are
    there, leave the processors to whoever else wants them."""

    model: ModelConfig
    executor: ExecutorConfig
    gpu: GPU
    processes: int
    quietly: bool


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far it is: the first ``ready`` entries of the plan (`plan.all_keys`) have all their kernels. ``done`` and
    ``total`` count kernels and their launchers (total is 0 until it is known); ``failed`` says what could not be
    compiled, and why."""

    ready: int
    done: int
    total: int
    failed: list[str]
    finished: bool


class Report(msgspec.Struct, frozen=True):
    """Of a worker: a job of the plan is done, with an ``error`` when it could not be."""

    job: int
    error: str | None = None


# So long a line is written to a pipe in one piece (POSIX's PIPE_BUF is 512, Linux' 4096).
MAX_LINE = 2048
