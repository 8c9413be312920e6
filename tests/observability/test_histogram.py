"""The cheap histogram says what prometheus_client's says of the same values."""

import random
import timeit

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as Reference
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from firsttoken.observability.histogram import Histogram, Histograms

EDGES = (0.00005, 0.001, 0.5, 1, 20)


class Both(Collector):
    def __init__(self, *histograms):
        self._histograms = histograms

    def collect(self):
        for one in self._histograms:
            yield one.family()


def samples(text, name):
    return {
        (s.name, *sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if family.name == name and not s.name.endswith("_created")
    }


def test_it_says_what_the_reference_says():
    registry = CollectorRegistry()
    reference = Reference("a_seconds", "x", ["kind"], buckets=EDGES, registry=registry)
    ours = Histograms("a_seconds", "x", ["kind"], EDGES)
    drawn = random.Random(1)
    for value in [*EDGES, 0, 1e9, *(drawn.expovariate(2) for _ in range(200))]:  # edges belong to their bucket
        for kind in ("one", 'odd "two"'):
            reference.labels(kind).observe(value)
            ours.of(kind).observe(value)
    own = CollectorRegistry()
    own.register(Both(ours))
    assert samples(generate_latest(own).decode(), "a_seconds") == samples(
        generate_latest(registry).decode(), "a_seconds"
    )


def test_of_no_values_there_is_a_family_without_samples():
    assert Histograms("a", "x", ["kind"], EDGES).family().samples == []


def test_a_histogram_of_labels_is_made_once():
    histograms = Histograms("a", "x", ["kind"], EDGES)
    assert histograms.of("one") is histograms.of("one")
    assert histograms.of("one") is not histograms.of("two")


def test_observing_is_cheap():
    observe = Histogram(EDGES).observe
    assert min(timeit.repeat(lambda: observe(0.02), number=2000, repeat=5)) / 2000 < 5e-6
