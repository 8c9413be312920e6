"""What a decode step costs the host: CPU time of the loop's thread for all but the device's own work.

The real loop, scheduler, KV cache, socket and executor with graphs, around a model that has no layers: a captured step
launches nothing, and its result is there at once. What is left is the Python of a step and its system calls; what a
driver takes to launch a graph and to record an event comes on top. ``--rows`` requests decode at once, ``--steps``
steps a round; the least of ``--rounds`` is told, as others' work on the machine only adds.

    TRITON_INTERPRET=1 python -m benchmarks.host_step --rows 1 8 64 --json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from time import thread_time_ns
from typing import Any

from torch import Tensor

from firsttoken.core.kv_format import KVFormat
from firsttoken.core.request import EngineRequest
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.step_sizes import GRAPH_SIZES
from firsttoken.engine.build import assemble
from firsttoken.engine.config import EngineConfig
from firsttoken.engine.loop import EngineLoop
from firsttoken.executor.ahead.plan import GREEDY
from firsttoken.executor.config import ExecutorConfig
from firsttoken.executor.graphs.executor import GraphExecutor
from firsttoken.executor.graphs.runtime import HostRuntime
from firsttoken.kernels.launch import interpreted
from firsttoken.models.step_view import Kept, StepView
from firsttoken.scheduler.budget import TokenCap
from firsttoken.scheduler.step_learner import LearningStepTime
from firsttoken.scheduler.step_time import FittedStepTime
from firsttoken.transport.framing import frame
from firsttoken.transport.messages import ENCODER, Submit
from firsttoken.transport.socket_channel import SocketEngineEnd

PROMPT = 16
SETTLING = 40  # steps before the first round


@dataclass(frozen=True)
class Options:
    rows: int
    steps: int
    rounds: int

    @property
    def length(self) -> int:
        """Of each request, which must outlive all rounds."""
        return PROMPT + SETTLING + self.rounds * self.steps + 100


class NoModel:
    """Has no logits, so nothing is sampled: all tokens are 0."""

    vocab_size, nbytes, tile_rows = 100, 0, 64

    def forward(self, step: StepView, kept: Kept | None = None) -> None:
        pass

    def logits(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError("nothing is kept here")


class NothingRuntime(HostRuntime):
    """Launching a graph costs nothing."""

    def capture(self, segment: Callable[[], object]) -> Callable[[], None]:
        return lambda: None


def start_front_end(engine_end: socket.socket, own_end: socket.socket) -> int:
    """A process that reads all that the engine says, as it comes, and throws it away; the number of it."""
    child = os.fork()
    if child == 0:
        engine_end.close()
        while own_end.recv(1 << 16):
            pass
        os._exit(0)
    own_end.close()
    return child


def make_loop(options: Options, sock: socket.socket) -> EngineLoop:
    """A loop around the engine's end of a socket."""
    blocks_each = -(-options.length // 16)
    executor_config = ExecutorConfig(
        device="graphs",
        dtype="bfloat16",
        quantization="none",
        kv_format=KVFormat(dtype="bfloat16", layers=1, kv_heads=1, head_dim=16),
        kv_blocks=options.rows * (blocks_each + 1),
        max_num_seqs=max(options.rows, 64),
        max_model_len=options.length,
        max_step_tokens=PROMPT * options.rows,
        threads=1,
        adaptive_threads=False,
    )
    config = EngineConfig(
        model="none",
        executor=executor_config,
        prefix_caching=True,
        budget=TokenCap(alone=PROMPT * options.rows, mixed=PROMPT),
        step_time=LearningStepTime(FittedStepTime(GRAPH_SIZES, ((1, 4.0), (512, 11.0)), 3e-5, 1e-6, 5e-4)),
        in_flight=2,
    )
    executor = GraphExecutor(executor_config, NoModel(), NothingRuntime())
    executor.capture(executor.table.shape(options.rows, [], 0), GREEDY)
    return assemble(config, "none", executor, SocketEngineEnd(sock))


def request(number: int, length: int) -> EngineRequest:
    tokens = array("I", [number * PROMPT + i for i in range(PROMPT)])
    params = SamplingParams(temperature=0, max_tokens=length - PROMPT)
    return EngineRequest(id=number, prompt=tokens.tobytes(), params=params, seed=0, max_tokens=length - PROMPT)


def measure(options: Options) -> float:
    """CPU time of a step in us."""
    left, right = socket.socketpair()
    right.sendall(frame(ENCODER.encode(Submit([request(i, options.length) for i in range(options.rows)]))))
    front_end = start_front_end(left, right)
    loop = make_loop(options, left)
    # What `run` does before its first turn.
    loop._host.resume()
    loop._recorder.start()
    for _ in range(SETTLING):
        loop.turn()
    best = float("inf")
    for _ in range(options.rounds):
        began = thread_time_ns()
        for _ in range(options.steps):
            loop.turn()
        best = min(best, (thread_time_ns() - began) / options.steps / 1e3)
    left.close()
    os.waitpid(front_end, 0)
    records = loop.ledger.snapshot()[-options.steps :]
    if not all(record.captured and record.decode_rows == options.rows for record in records):
        raise RuntimeError("some steps were not the captured decode steps that are to be measured")
    return best


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args(argv)
    if not interpreted():
        parser.error("the kernels of the first steps run in Triton's interpreter: set TRITON_INTERPRET=1")
    result: dict[str, Any] = {
        f"rows_{rows}_us": round(measure(Options(rows, args.steps, args.rounds)), 1) for rows in args.rows
    }
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
