"""A queue of waiting requests alone, served one at a time."""

from __future__ import annotations

from array import array
from typing import Any

from firsttoken.core.request import EngineRequest, Request
from firsttoken.core.sampling_params import SamplingParams
from firsttoken.core.service import Targets
from firsttoken.scheduler.queue import Ticket, WaitingQueue


def request(
    number: int, tenant: str, *, prompt: int = 10, output: int = 10, share: float = 1.0, **fields: Any
) -> Request:
    return Request(
        EngineRequest(
            id=number,
            prompt=array("I", [1] * prompt).tobytes(),
            params=SamplingParams(max_tokens=output),
            seed=0,
            max_tokens=output,
            tenant=tenant,
            share=share,
            **fields,
        )
    )


class Line:
    def __init__(self, patience: float = 0.0) -> None:
        self.queue = WaitingQueue(Targets(), 1, patience)
        self.count = 0

    def push(self, tenant: str, **fields: Any) -> Ticket:
        self.count += 1
        ticket = Ticket(request(self.count, tenant, **fields), self.count, 0)
        self.queue.push(ticket)
        return ticket

    def serve(self) -> Ticket:
        (ticket,) = self.queue.first(1)
        self.queue.start(ticket)
        ticket.request.first_scheduled = True
        return ticket

    def served(self, count: int) -> list[str]:
        return [self.serve().request.tenant for _ in range(count)]
