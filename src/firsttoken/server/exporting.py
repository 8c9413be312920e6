"""Exporting what is served by OTLP, for as long as it is served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from firsttoken.observability.otlp.export import OtlpExport
from firsttoken.observability.otlp.settings import OtlpSettings

if TYPE_CHECKING:
    from firsttoken.frontend.async_llm import AsyncLLM


@contextlib.asynccontextmanager
async def exporting(settings: OtlpSettings | None, llm: AsyncLLM) -> AsyncIterator[None]:
    """Within this scope the requests and metrics of ``llm`` are exported; not at all without ``settings``."""
    if settings is None:
        yield
        return
    export = OtlpExport(settings, llm.metrics.registry)
    export.start()
    leave = llm.recent.subscribe(export.offer)
    try:
        yield
    finally:
        leave()
        await asyncio.to_thread(export.close)
