"""The real loop, scheduler and KV cache around a scripted executor, on a thread."""

from __future__ import annotations

import queue
import threading
from array import array

from firsttoken.core.kv_format import KVFormat
from firsttoken.core.request import EngineRequest
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import Targets
from firsttoken.core.step_sizes import StepSizes
from firsttoken.engine.build import assemble
from firsttoken.engine.config import EngineConfig
from firsttoken.executor.config import ExecutorConfig
from firsttoken.scheduler.budget import TokenCap
from firsttoken.scheduler.step_learner import LearningStepTime
from firsttoken.scheduler.step_time import FittedStepTime
from firsttoken.scheduler.window import find_window
from firsttoken.transport.inprocess import in_process_channel
from firsttoken.transport.messages import Refused, Shutdown, StepOutputs, Submit
from tests.support.scripted import ScriptedExecutor

_TARGETS = Targets()


class Engine:
    """A loop on a thread, and what it said."""

    def __init__(
        self,
        script,
        *,
        depth=1,
        blocks=64,
        seqs=4,
        max_len=256,
        step_s=0.0,
        targets=_TARGETS,
        batch_window="0",
        grammars=None,
    ):
        engine_end, self.client = in_process_channel()
        self.executor = ScriptedExecutor(script, step_s=step_s)
        self.step_time = LearningStepTime(FittedStepTime(StepSizes(), ((1, 1.0), (2, 2.0)), 0.0, 0.0, 0.0))
        self.config = EngineConfig(
            model="m",
            executor=ExecutorConfig(
                device="cpu",
                dtype="float32",
                quantization="none",
                kv_format=KVFormat(dtype="float32", layers=1, kv_heads=1, head_dim=8),
                kv_blocks=blocks,
                max_num_seqs=seqs,
                max_model_len=max_len,
                max_step_tokens=64,
                threads=1,
                adaptive_threads=False,
            ),
            prefix_caching=True,
            budget=TokenCap(alone=64, mixed=16),
            step_time=self.step_time,
            in_flight=depth,
            window=find_window(batch_window, targets, queue_limit=seqs, step_time=self.step_time),
        )
        self.loop = assemble(
            self.config, "m", self.executor, engine_end, targets, grammars, grammars_ahead=grammars is not None
        )
        self.messages: queue.SimpleQueue = queue.SimpleQueue()
        self.closed = threading.Event()
        self.error = None
        self.kv = None  # the latest report that `collect` has seen
        self.client.listen(self.messages.put, self.closed.set)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        try:
            self.loop.run()
        except Exception as error:
            self.error = error

    def submit(self, *requests):
        self.client.send(Submit(list(requests)))

    def collect(self, ids, timeout=20):
        """Tokens and last delta of each request, once all have ended; refusals stand in for last deltas."""
        tokens, last, stats = {i: [] for i in ids}, {}, None
        while len(last) < len(ids):
            message = self.messages.get(timeout=timeout)
            if isinstance(message, Refused):
                last[message.id] = message
            elif isinstance(message, StepOutputs):
                stats = message.stats
                self.kv = message.kv or self.kv
                for delta in message.deltas:
                    tokens[delta.id] += delta.tokens
                    if delta.finish_reason:
                        assert delta.id not in last, "ended twice"
                        last[delta.id] = delta
        return tokens, last, stats

    def stop(self):
        self.client.send(Shutdown())
        self.thread.join(10)
        assert not self.thread.is_alive()


def ask(request_id, prompt, *, max_tokens=8, stop_ids=(), deadline_ns=0, service=2, **params):
    return EngineRequest(
        deadline_ns=deadline_ns,
        service=service,
        id=request_id,
        prompt=array("I", prompt).tobytes(),
        params=SamplingParams(max_tokens=max_tokens, **params),
        seed=request_id,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
    )


def count_up(request_id, tokens):
    return tokens[-1] + 1
