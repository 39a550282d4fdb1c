"""A sink that keeps what it is told, and the reports of those that fail."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from telemetry_stream import tell

from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.watch.telemetry.prometheus import PrometheusSink
from cartridge_forge.protocols.ports import TraceSpan
from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.protocols.records.status import RunStatus
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.run_directory import RunDirectory

MESH = Path(__file__).resolve().parents[4] / "meshes" / "longhealth.yaml"


@dataclass
class RecordingSink:
    """Keeps what it is told; raises from the call named `breaks`; its end waits for `may_close`."""

    breaks: str = ""
    may_close: threading.Event | None = None
    told: list[str] = field(default_factory=list)

    def _take(self, what: str) -> None:
        self.told.append(what)
        if what == self.breaks:
            raise OSError(28, "No space left on device")

    def event(self, event: Mapping[str, Any]) -> None:
        self._take("event")

    def metric(self, row: MetricRow) -> None:
        self._take("metric")

    def span(self, span: TraceSpan) -> None:
        self._take("span")

    def status(self, status: RunStatus) -> None:
        self._take("status")

    def close(self) -> None:
        if self.may_close is not None:
            self.may_close.wait()
        self._take("close")


Reports = list[tuple[str, str]]


def reporting() -> tuple[Reports, Callable[[str, str], None]]:
    """Return the reports so far, and what a hub calls with one."""
    reports: Reports = []
    return reports, lambda sink, message: reports.append((sink, message))


def spec(*sets: str) -> RunSpec:
    """Return the LongHealth run, with some keys set."""
    return load_spec(str(MESH), sets=sets).spec


def directory(tmp_path: Path) -> RunDirectory:
    """Return a new directory of such a run."""
    return RunDirectory.create(tmp_path, "longhealth", "spec\n")


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
