"""The figures of the self-check that an engine made at its start, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from firsttoken.core.agreement import SelfCheck


def self_check_families(checked: SelfCheck) -> Iterator[Metric]:
    """Constant while the engine lives. An engine whose model has no reference has none of these series."""
    for name, help_text, value in (
        ("top1_agreement", "Share of positions with the reference's likeliest token (0 to 1)", checked.top1_agreement),
        ("kl_nats", "Mean KL divergence from the reference (nats)", checked.kl),
        ("perplexity", "Perplexity on the reference's prompts", checked.perplexity),
        ("reference_perplexity", "The reference's own perplexity on its prompts", checked.reference_perplexity),
    ):
        yield GaugeMetricFamily(f"firsttoken_self_check_{name}", f"At the start: {help_text}", value=value)
