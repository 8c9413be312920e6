"""An engine that says what a test tells it to say, when it does: both ends of the channel are calls."""

from __future__ import annotations

from firsttoken.core.clock import now_ns
from firsttoken.core.timeline import Mark
from firsttoken.transport.messages import EngineInfo, EngineStats, Ready, RequestDelta, StepOutputs, Submit

INFO = EngineInfo(
    model="driven",
    max_model_len=65536,
    vocab_size=300,
    max_num_seqs=64,
    kv_blocks=65536,
    block_tokens=16,
    bytes_per_block=1024,
    device="none",
    dtype="float32",
    quantization="none",
    kv_dtype="float32",
)


class DrivenEngine:
    """The handle of such an engine. Its requests are in `ids`, in their order."""

    pid = None

    def __init__(self) -> None:
        self.client = self
        self.sent: list = []
        self.ids: list[int] = []
        self._begun: set[int] = set()

    def listen(self, on_message, on_close) -> None:
        self.tell, self.hang_up = on_message, on_close
        on_message(Ready(INFO))

    def send(self, message) -> None:
        self.sent.append(message)
        if isinstance(message, Submit):
            self.ids += [request.id for request in message.requests]

    def alive(self) -> bool:
        return True

    def how_it_ended(self) -> str:
        return ""

    def stop(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...

    def step(self, text: str = "x", *ids: int, end: str | None = None) -> None:
        """A step that brings ``text``, a token for each byte, to each of these requests, or to all."""
        deltas = []
        for id_ in ids or self.ids:
            marks = () if id_ in self._begun else (Mark.ARRIVED, Mark.SCHEDULED, Mark.FIRST_TOKEN)
            self._begun.add(id_)
            stamps = [(int(mark), now_ns()) for mark in (*marks, *((Mark.FINISHED,) if end else ()))]
            deltas.append(RequestDelta(id_, list(text.encode()), finish_reason=end, stamps=stamps))
        self.tell(StepOutputs(deltas, EngineStats(steps=1, heartbeat_ns=now_ns())))
