"""Export to OpenTelemetry: spans as traces, steps as metrics, over OTLP/HTTP.

The standard environment variables configure it (OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_EXPORTER_OTLP_HEADERS, OTEL_METRIC_EXPORT_INTERVAL, OTEL_RESOURCE_ATTRIBUTES, ...).

Each training step is one trace: its root is the step, and its children are the phases and requests
that name the same arm and step. The ids of step and trace are computed from run, arm and step,
because the root is exported last. A span without a step is a trace of its own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags

from cartridge_forge.plugins.watch.telemetry.hub import epoch_seconds, losses, role_of
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.ports import TraceSpan
from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.protocols.records.status import RunStatus
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.run_directory import RunDirectory

SERVICE = "cartridge-forge"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
TIMEOUT = "OTEL_EXPORTER_OTLP_TIMEOUT"
TIMEOUT_SECONDS = 2.0  # default for one export, which `close` waits for


class OtlpSink:
    """Export from threads of the SDK, so an unreachable collector does not delay the run.

    Raises SpecError where the environment sets a protocol other than http/protobuf.
    """

    def __init__(self, run: str, mesh: str) -> None:
        protocol = os.environ.get(PROTOCOL, "http/protobuf")
        if protocol != "http/protobuf":
            raise SpecError(
                f"telemetry.sinks: otlp speaks http/protobuf: got {PROTOCOL}={protocol}; unset it, "
                "and point OTEL_EXPORTER_OTLP_ENDPOINT to the collector's HTTP port"
            )
        timeout = None if TIMEOUT in os.environ else TIMEOUT_SECONDS
        resource = Resource.create(
            {"service.name": SERVICE, "service.instance.id": run, "forge.mesh": mesh}
        )
        self._run = run
        self._ids = StepIds()
        self._traces = TracerProvider(
            resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        self._traces.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=timeout)))
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(timeout=timeout))
        self._meters = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._tracer = self._traces.get_tracer(SERVICE)
        meter = self._meters.get_meter(SERVICE)
        self._loss = meter.create_gauge("forge.training.loss")
        self._reward = meter.create_gauge("forge.episode.reward")
        self._gradient = meter.create_gauge("forge.gradient.norm")
        self._rate = meter.create_gauge("forge.learning_rate")
        self._accuracy = meter.create_gauge("forge.accuracy", "1")
        self._tokens = meter.create_counter("forge.tokens.trained", "{token}")
        self._stale = meter.create_counter("forge.tokens.stale", "{token}")
        self._bytes = meter.create_counter("forge.plane.bytes", "By")
        self._phase = meter.create_histogram("forge.step.phase.duration", "s")
        self._request = meter.create_histogram("forge.request.duration", "s")

    def event(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "step":
            self._stepped(event)
        elif event["event"] == "evaluated":
            facts = {"arm": event["arm"], "questions": "held_out"}
            self._accuracy.set(event["accuracy"], {**facts, "decoding": "greedy"})
            if event.get("sampled") is not None:
                sampled = event["sampled"]["accuracy"]
                self._accuracy.set(sampled, {**facts, "decoding": "sampled"})

    def _stepped(self, event: Mapping[str, Any]) -> None:
        arm, step, seconds = event["arm"], event["step"], event["seconds"]
        for phase, spent in seconds.items():
            self._phase.record(spent, {"arm": arm, "phase": phase})
        for tensors, count in event.get("bytes", {}).items():
            self._bytes.add(count, {"tensors": tensors})
        end = epoch_seconds(event)
        self._ids.next = self._step_ids(arm, step)
        root = self._tracer.start_span(
            "step",
            context=trace.set_span_in_context(trace.INVALID_SPAN),
            attributes={"forge.arm": arm, "forge.step": step},
            start_time=_nanoseconds(end - seconds["step"]),
        )
        root.end(_nanoseconds(end))

    def metric(self, row: MetricRow) -> None:
        facts = {"arm": row.arm}
        for channel, loss in losses(row).items():
            self._loss.set(loss, {**facts, "channel": channel})
        if "reward" in row.episodes:
            self._reward.set(row.episodes["reward"], facts)
        self._gradient.set(row.grad_norm, facts)
        self._rate.set(row.lr, facts)
        self._tokens.add(row.tokens, facts)
        self._stale.add(row.stale_tokens, facts)
        if row.accuracy is not None:
            probe = {"questions": "probe", "decoding": "greedy"}
            self._accuracy.set(row.accuracy, {**facts, **probe})

    def span(self, span: TraceSpan) -> None:
        facts = span.facts
        parent = trace.INVALID_SPAN
        if "arm" in facts and "step" in facts:
            ids = self._step_ids(str(facts["arm"]), int(facts["step"]))
            parent = NonRecordingSpan(
                SpanContext(*ids, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
            )
        exported = self._tracer.start_span(
            f"{role_of(span.lane)}.{span.name}",
            context=trace.set_span_in_context(parent),
            attributes={"forge.lane": span.lane, **{f"forge.{k}": v for k, v in facts.items()}},
            start_time=_nanoseconds(span.begin),
        )
        outcome = str(facts.get("outcome", "ok"))
        if outcome != "ok":
            exported.set_status(Status(StatusCode.ERROR, outcome))
        exported.end(_nanoseconds(max(span.begin, span.end)))
        if "request" in facts:
            attributes = {"role": role_of(span.lane), "method": span.name, "outcome": outcome}
            self._request.record(max(0.0, span.end - span.begin), attributes)

    def status(self, status: RunStatus) -> None:
        """Ignore the status: Prometheus exports it."""

    def close(self) -> None:
        self._traces.shutdown()
        self._meters.shutdown(timeout_millis=TIMEOUT_SECONDS * 1000)

    def _step_ids(self, arm: str, step: int) -> tuple[int, int]:
        """Return (trace id, span id) of a step's root."""
        digest = hashlib.sha256(f"{self._run}/{arm}/{step}".encode()).digest()
        return int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:24], "big")


class StepIds(RandomIdGenerator):
    """Generate random ids, but for the one span whose (trace id, span id) is set as `next`."""

    next: tuple[int, int] | None = None

    def generate_trace_id(self) -> int:
        return self.next[0] if self.next else super().generate_trace_id()

    def generate_span_id(self) -> int:
        ids, self.next = self.next, None
        return ids[1] if ids else super().generate_span_id()


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def open_sink(spec: RunSpec, directory: RunDirectory) -> OtlpSink:
    """Send telemetry to the collector that the environment names."""
    return OtlpSink(directory.id, spec.mesh.name)
