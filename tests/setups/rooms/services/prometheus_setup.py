"""Sinks of Prometheus, and what they answer."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from telemetry_stream import tell

from cartridge_forge.plugins.watch.telemetry.prometheus import PrometheusSink

Labels = dict[str, str]


@pytest.fixture(scope="module")
def told() -> Iterator[PrometheusSink]:
    """One that was told a whole run; nothing tells it more."""
    sink = PrometheusSink("127.0.0.1:0", "run-1", "small", staleness=0)
    tell(sink, time.time())
    yield sink
    sink.close()


@pytest.fixture
def sink() -> Iterator[PrometheusSink]:
    """Yield a sink that was told nothing."""
    sink = PrometheusSink("127.0.0.1:0", "run-1", "small", staleness=0)
    yield sink
    sink.close()


def scraped(sink: PrometheusSink) -> dict[str, list[tuple[Labels, float]]]:
    """Sample name -> labels and value."""
    found: dict[str, list[tuple[Labels, float]]] = {}
    with urllib.request.urlopen(sink.url, timeout=60) as answer:
        text = answer.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(sink: PrometheusSink, name: str, **labels: str) -> float:
    """The one sample of that name with those labels among its own."""
    fits = [v for at, v in scraped(sink)[name] if labels.items() <= at.items()]
    assert len(fits) == 1, (name, labels, fits)
    return fits[0]
