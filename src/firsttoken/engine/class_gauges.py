"""What is told of each service class."""

from __future__ import annotations

from firsttoken.core.clock import NS_PER_MS
from firsttoken.core.service import ServiceClass
from firsttoken.scheduler.admission import Admission
from firsttoken.scheduler.headroom import Outlook
from firsttoken.transport.messages import ClassStats

# Predictions take longer than all other totals together, and whoever reads them does so every few seconds.
OUTLOOK_NS = 100 * NS_PER_MS


class ClassGauges:
    """Reads an `Admission`; its predictions may be `OUTLOOK_NS` old, the counts are of now."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._outlooks: list[Outlook] = []
        self._looked_ns = 0

    def read(self, now_ns: int) -> list[ClassStats]:
        admission, backlog = self._admission, self._admission.backlog
        if not self._outlooks or now_ns - self._looked_ns > OUTLOOK_NS:
            self._looked_ns = now_ns
            self._outlooks = [admission.headroom.outlook(service, now_ns) for service in ServiceClass]
        return [
            ClassStats(backlog.waiting[service], backlog.running[service], dict(admission.refused[service]), *outlook)
            for service, outlook in zip(ServiceClass, self._outlooks, strict=True)
        ]
