"""Combine all telemetry sinks of a run in one `TelemetrySink`, and name the numbers that all of
them show, each in one way.

A sink that fails is reported once and removed, so telemetry never ends a run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.packages import (
    APART,
    extra_command,
    install_command,
    is_missing,
)
from cartridge_forge.protocols.plugins import resolve
from cartridge_forge.protocols.ports import TelemetrySink, TraceSpan
from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.protocols.records.status import RunStatus
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.run_directory import RunDirectory


def losses(row: MetricRow) -> dict[str, float]:
    """Return channel -> its loss in the step, without channels that had no data. A run without
    episodes has doc_kl alone."""
    if not row.channels:
        return {} if row.kl is None else {"doc_kl": row.kl}
    return {name: facts["value"] for name, facts in row.channels.items() if facts["count"]}


def row_values(row: MetricRow) -> dict[str, float]:
    """Return a step's deterministic values: `{"loss/doc_kl": 0.431, "optimizer/grad_norm": 0.87,
    ...}`.

    With episodes, every fact of the row is added: "grpo/ratio", "cosine/doc_kl/grpo",
    "episodes/reward".
    """
    values = {f"loss/{channel}": loss for channel, loss in losses(row).items()}
    for channel, facts in row.channels.items():
        values |= {f"{channel}/{name}": fact for name, fact in facts.items() if name != "value"}
    values |= {f"cosine/{pair}": cosine for pair, cosine in row.cosines.items()}
    values |= {f"episodes/{name}": count for name, count in row.episodes.items()}
    values |= {f"sampler_gap/{name}": value for name, value in row.sampler_gap.items()}
    values |= {f"verified/{name}": value for name, value in row.verified.items()}
    values |= {
        "optimizer/grad_norm": row.grad_norm,
        "optimizer/learning_rate": row.lr,
        "tokens/trained": row.tokens,
        "tokens/stale": row.stale_tokens,
    }
    if row.accuracy is not None:
        values["accuracy/probe"] = row.accuracy
    return values


def step_values(event: Mapping[str, Any]) -> dict[str, float]:
    """Return a step's measured `{"seconds/rollout": 0.14, "tokens_per_second": 978.3, ...}`."""
    values = {f"seconds/{phase}": seconds for phase, seconds in event["seconds"].items()}
    if "tokens_per_second" in event:
        values["tokens_per_second"] = event["tokens_per_second"]
    values |= {f"bytes/{kind}": count for kind, count in event.get("bytes", {}).items()}
    spent = event.get("teachers", {}).get("dollars", {})
    values |= {f"dollars/{teacher}": dollars for teacher, dollars in spent.items()}
    return values


def evaluated_values(event: Mapping[str, Any]) -> dict[str, float]:
    """Return `{"accuracy/greedy": 0.85, "accuracy/sampled": 0.64}`, as far as measured."""
    values = {"accuracy/greedy": event["accuracy"]}
    if event.get("sampled") is not None:
        values["accuracy/sampled"] = event["sampled"]["accuracy"]
    return values


def role_of(lane: str) -> str:
    """Return the role of a replica's name: `role_of("generator[1]") == "generator"`."""
    return lane.partition("[")[0]


def epoch_seconds(event: Mapping[str, Any]) -> float:
    """Return the time of an event of events.jsonl, in seconds since the epoch."""
    return datetime.fromisoformat(event["time"]).timestamp()


class ArmSink:
    """Pass a run's scalars to `log`, each arm's under its own steps; spans and statuses have none.
    A base of sinks that keep curves."""

    def event(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "step":
            self.log(event["arm"], {"step": event["step"], **step_values(event)})
        elif event["event"] == "evaluated":
            self.log(event["arm"], evaluated_values(event))

    def metric(self, row: MetricRow) -> None:
        self.log(row.arm, {"step": row.step, "version": row.version, **row_values(row)})

    def span(self, span: TraceSpan) -> None:
        """Ignore the span: it has no scalar."""

    def status(self, status: RunStatus) -> None:
        """Ignore the status: the rows have its scalars."""

    def log(self, arm: str, values: Mapping[str, float]) -> None:
        """Keep an arm's values, its "step" among them where they are of one."""
        raise NotImplementedError


CLOSE_SECONDS = 5.0
# Imports of each optional sink, checked before anything is started.
SINK_MODULES: Mapping[str, tuple[str, ...]] = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "otlp": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "trackio": ("trackio",),
}


class Telemetry:
    """Pass events to named sinks. `report(sink, message)` is called once for a sink that failed, in
    the thread of the failure. `metrics_url` is None where metrics are not served."""

    def __init__(
        self,
        sinks: Sequence[tuple[str, TelemetrySink]],
        report: Callable[[str, str], None],
        metrics_url: str | None = None,
    ) -> None:
        self._sinks = dict(sinks)
        self._report = report
        self.metrics_url = metrics_url

    def event(self, event: Mapping[str, Any]) -> None:
        self._tell(lambda sink: sink.event(event))

    def metric(self, row: MetricRow) -> None:
        self._tell(lambda sink: sink.metric(row))

    def span(self, span: TraceSpan) -> None:
        self._tell(lambda sink: sink.span(span))

    def status(self, status: RunStatus) -> None:
        self._tell(lambda sink: sink.status(status))

    def close(self) -> None:
        """Close all sinks concurrently, within CLOSE_SECONDS. A sink that takes longer is reported
        and left to its daemon thread."""
        sinks, self._sinks = self._sinks, {}
        results = _close_all(sinks)
        for name in sinks:
            error = results.get(name, TimeoutError(f"not closed within {CLOSE_SECONDS:g} s"))
            if error is not None:
                self._report(name, _message(error))

    def _tell(self, tell: Callable[[TelemetrySink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                tell(sink)
            except Exception as error:
                # Removed before the report, which may send an event to this method again.
                if self._sinks.pop(name, None) is not None:
                    threading.Thread(target=_close, args=(sink, {}, name), daemon=True).start()
                    self._report(name, _message(error))


def require_sinks(spec: RunSpec) -> None:
    """Raise SpecError for an optional sink whose packages are not installed. Imports none."""
    for sink in spec.mesh.telemetry.sinks:
        for module in SINK_MODULES[sink]:
            if is_missing(module):
                remedy = install_command(module) if module in APART else extra_command("sinks")
                raise SpecError(
                    f"telemetry.sinks: {sink} needs the package {module}, which is not "
                    f"installed: {remedy}, or leave it out"
                )


def open_sinks(
    spec: RunSpec, directory: RunDirectory, report: Callable[[str, str], None]
) -> Telemetry:
    """Return every sink of `spec.mesh.telemetry`, open. Raises SpecError for one that cannot open,
    and then closes the others."""
    require_sinks(spec)
    wanted = spec.mesh.telemetry
    sinks: dict[str, TelemetrySink] = {}
    url = None
    try:
        if wanted.metrics is not None:
            metrics = resolve("sinks", "metrics")(spec, directory)
            sinks["metrics"], url = metrics, metrics.url
        for name in (*(["trace"] if wanted.trace else []), *dict.fromkeys(wanted.sinks)):
            sinks[name] = resolve("sinks", name)(spec, directory)
    except BaseException:
        _close_all(sinks)
        raise
    return Telemetry(list(sinks.items()), report, url)


def _close_all(sinks: Mapping[str, TelemetrySink]) -> dict[str, Exception | None]:
    """Return name -> the error of its `close`, or None; without sinks not done in CLOSE_SECONDS."""
    results: dict[str, Exception | None] = {}
    threads = [
        threading.Thread(target=partial(_close, sink, results, name), daemon=True)
        for name, sink in sinks.items()
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + CLOSE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(results)


def _close(sink: TelemetrySink, results: dict[str, Exception | None], name: str) -> None:
    try:
        sink.close()
        results[name] = None
    except Exception as error:
        results[name] = error


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
