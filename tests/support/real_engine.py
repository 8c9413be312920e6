"""A whole engine on a thread (loop, scheduler, KV cache, executor, model, sampler), asked on its channel."""

from __future__ import annotations

import threading
from array import array

from firsttoken.core.engine_args import EngineArgs
from firsttoken.core.plan import PromptLogprobs
from firsttoken.core.request import EngineRequest
from firsttoken.engine.launch import start_thread
from firsttoken.transport.messages import Failed, Ready, Refused, StepOutputs, Submit


class Engine:
    def __init__(self, model: str, **args):
        self.handle = start_thread(EngineArgs(model=model, quantization="none", threads=1, **args))
        self._changed = threading.Condition()
        self._tokens: dict[int, list[int]] = {}
        self._last: dict[int, object] = {}
        self.info = None
        self.stats = None
        self.steps = []
        self.next_id = 0
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        self.handle.client.listen(self._hear, lambda: None)
        with self._changed:
            assert self._changed.wait_for(lambda: self.info or self._last.get("failed"), 60)
        assert self.info, self._last["failed"]

    def _hear(self, message):
        with self._changed:
            match message:
                case Ready(info=info):
                    self.info = info
                case Failed():
                    self._last["failed"] = message
                case Refused(id=request_id):
                    self._last[request_id] = message
                case StepOutputs(deltas=deltas, stats=stats, steps=steps):
                    self.stats = stats
                    self.steps += steps
                    for delta in deltas:
                        self._tokens[delta.id] += delta.tokens
                        if delta.prompt_logprobs is not None:
                            self.prompt_logprobs[delta.id] = delta.prompt_logprobs
                        if delta.finish_reason:
                            self._last[delta.id] = delta
            self._changed.notify_all()

    def run(self, prompts, params, *, together=True, pooling=None):
        """Output tokens and last delta of each prompt. ``pooling``: the kind for all, or one for each."""
        params = params if isinstance(params, list) else [params] * len(prompts)
        kinds = pooling if isinstance(pooling, list) else [pooling] * len(prompts)
        if together:
            ids = self.submit(prompts, params, pooling=kinds)
            self.wait(ids)
        else:
            ids = []
            for number, (prompt, one, kind) in enumerate(zip(prompts, params, kinds, strict=True)):
                ids += self.submit([prompt], one, pooling=kind, first=number)
                self.wait(ids)
        return [self._tokens[i] for i in ids], [self._last[i] for i in ids]

    def submit(self, prompts, params, *, pooling=None, first=0, **fields):
        """Ids of the requests, which go in one message; a prompt's seed is that of its number, counted from ``first``.
        ``fields`` are the requests' others."""
        ids, requests = [], []
        for i, prompt in enumerate(prompts):
            one = params[i] if isinstance(params, list) else params
            self._tokens[self.next_id] = []
            ids.append(self.next_id)
            requests.append(
                EngineRequest(
                    id=self.next_id,
                    prompt=array("I", prompt).tobytes(),
                    params=one,
                    seed=1000 + first + i,
                    max_tokens=one.max_tokens,
                    pooling=pooling[i] if isinstance(pooling, list) else pooling,
                    **fields,
                )
            )
            self.next_id += 1
        self.handle.client.send(Submit(requests))
        return ids

    def wait(self, ids):
        """The last delta of each, once all have ended."""
        with self._changed:
            assert self._changed.wait_for(lambda: all(i in self._last for i in ids), 120)
        return [self._last[i] for i in ids]

    def stop(self):
        self.handle.stop(10)
