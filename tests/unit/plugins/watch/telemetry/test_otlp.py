"""OTLP over HTTP into a collector of the test's own, which decodes with OpenTelemetry's protocol
buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from telemetry_stream import STEPS, tell

from cartridge_forge.plugins.watch.telemetry.otlp import OtlpSink
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.streams import TraceSpan

NOW = 1785060942.125


class Collector:
    """What arrived, request by request."""

    def __init__(self) -> None:
        self.traces: list[ExportTraceServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.headers: list[dict[str, str]] = []

    def spans(self) -> list[Any]:
        return [
            span
            for request in self.traces
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def newest(self) -> dict[str, Any]:
        """name -> metric, of the last export."""
        (resource,) = self.metrics[-1].resource_metrics
        return {m.name: m for scope in resource.scope_metrics for m in scope.metrics}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    got = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.headers.append(dict(self.headers))
            answer: bytes
            if self.path == "/v1/traces":
                got.traces.append(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
            else:
                assert self.path == "/v1/metrics"
                got.metrics.append(ExportMetricsServiceRequest.FromString(body))
                answer = ExportMetricsServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, args=(0.02,))
    serving.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=forge")
    yield got
    server.shutdown()
    serving.join()
    server.server_close()


def facts(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


def point(metric: Any, **wanted: str) -> Any:
    """The one data point with those attributes."""
    points = getattr(metric, metric.WhichOneof("data")).data_points
    (found,) = [p for p in points if wanted.items() <= facts(p.attributes).items()]
    return found


def test_a_step_is_a_trace_with_its_phases_and_requests_below(collector: Collector) -> None:
    sink = OtlpSink("run-1", "small")
    tell(sink, NOW)
    sink.close()
    spans = collector.spans()
    roots = [s for s in spans if s.name == "step"]
    assert len(roots) == 2 * STEPS
    assert len({s.trace_id for s in spans}) == 2 * STEPS
    first = roots[0]
    assert first.parent_span_id == b""
    assert facts(first.attributes) == {"forge.arm": "on_policy", "forge.step": 1}
    # The event's time is in whole milliseconds.
    assert first.end_time_unix_nano == pytest.approx((NOW + 0.62) * 1e9, abs=1e6)
    assert first.end_time_unix_nano - first.start_time_unix_nano == pytest.approx(0.62e9, abs=1e3)
    below = [s for s in spans if s.trace_id == first.trace_id and s is not first]
    assert {s.parent_span_id for s in below} == {first.span_id}
    assert sorted(s.name for s in below) == sorted(
        ["generator.generate"] * 3
        + ["doc_teacher.score", "trainer.step"]
        + [f"controller.{phase}" for phase in ("rollout", "score", "train", "publish")]
    )
    asked = next(s for s in below if s.name == "trainer.step")
    assert facts(asked.attributes) == {
        "forge.lane": "trainer[0]", "forge.request": "trainer/1/0", "forge.arm": "on_policy",
        "forge.step": 1, "forge.version": 0, "forge.waited": 0.0, "forge.attempt": 1,
        "forge.outcome": "ok",
    }  # fmt: skip
    assert asked.end_time_unix_nano - asked.start_time_unix_nano == pytest.approx(0.298e9, abs=1e3)


def test_a_failed_request_is_an_error_and_a_stepless_one_a_trace_of_its_own(
    collector: Collector,
) -> None:
    sink = OtlpSink("run-1", "small")
    sink.span(TraceSpan("generator[0]", "load", NOW, NOW + 1, {"request": "1", "outcome": "died"}))
    sink.span(TraceSpan("generator[1]", "load", NOW, NOW + 1, {"request": "2", "outcome": "ok"}))
    sink.close()
    died, well = collector.spans()
    assert (died.status.code, died.status.message) == (Status.STATUS_CODE_ERROR, "died")
    assert well.status.code == Status.STATUS_CODE_UNSET
    assert died.parent_span_id == well.parent_span_id == b""
    assert died.trace_id != well.trace_id


def test_steps_are_metrics(collector: Collector) -> None:
    sink = OtlpSink("run-1", "small")
    tell(sink, NOW)
    sink.close()
    (resource,) = collector.metrics[-1].resource_metrics
    about = facts(resource.resource.attributes)
    assert about["service.name"] == "cartridge-forge"
    assert about["service.instance.id"] == "run-1"
    assert about["forge.mesh"] == "small"
    got = collector.newest()
    loss = point(got["forge.training.loss"], arm="offline", channel="doc_kl")
    assert loss.as_double == 0.5
    loss = point(got["forge.training.loss"], arm="on_policy", channel="grpo")
    assert loss.as_double == -1.0
    assert point(got["forge.episode.reward"], arm="on_policy").as_double == 0.25
    assert point(got["forge.tokens.trained"], arm="on_policy").as_int == 101 + 102 + 103 + 104
    assert point(got["forge.plane.bytes"], tensors="scores").as_int == 2 * STEPS * 4096
    train = point(got["forge.step.phase.duration"], arm="on_policy", phase="train")
    assert (train.count, train.sum) == (STEPS, pytest.approx(STEPS * 0.3))
    asked = point(got["forge.request.duration"], role="generator", method="generate", outcome="ok")
    assert asked.count == 2 * 3 * STEPS
    probe = point(got["forge.accuracy"], arm="on_policy", questions="probe")
    assert probe.as_double == 0.75
    assert got["forge.step.phase.duration"].unit == "s"


def test_headers_come_from_the_environment(collector: Collector) -> None:
    sink = OtlpSink("run-1", "small")
    tell(sink, NOW)
    sink.close()
    assert {header["x-team"] for header in collector.headers} == {"forge"}


def test_another_protocol_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(SpecError, match=r"telemetry\.sinks: .*OTEL_EXPORTER_OTLP_PROTOCOL=grpc"):
        OtlpSink("run-1", "small")
