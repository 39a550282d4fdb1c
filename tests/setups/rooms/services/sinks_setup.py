"""A sink that keeps what it is told, and the reports of those that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.protocols.records.status import RunStatus
from cartridge_forge.protocols.spec.loading import load_spec
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.protocols.streams import TraceSpan
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
