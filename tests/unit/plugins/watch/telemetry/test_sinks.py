"""Test the sinks of telemetry and the hub that feeds them."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from rooms.services.sinks_setup import RecordingSink, directory, reporting, scraped, spec, value
from telemetry_stream import STEPS, event, row, status, step_spans, tell
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trace_check import read_trace

from cartridge_forge.plugins.host.tls import certificates, read_identity
from cartridge_forge.plugins.watch.telemetry.hub import Telemetry, open_sinks, require_sinks
from cartridge_forge.plugins.watch.telemetry.otlp import OtlpSink
from cartridge_forge.plugins.watch.telemetry.prometheus import PrometheusSink
from cartridge_forge.plugins.watch.telemetry.tensorboard import TensorBoardSink
from cartridge_forge.plugins.watch.telemetry.trace import TraceSink
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.ports import TraceSpan


def one_of_each(telemetry: Telemetry) -> None:
    telemetry.event(event("publish", time.time()))
    telemetry.metric(row("on_policy", 1))
    telemetry.span(next(step_spans("on_policy", 1, time.time())))
    telemetry.status(status())


def test_every_sink_is_told_everything_in_order() -> None:
    first, second = RecordingSink(), RecordingSink()
    reports, report = reporting()
    telemetry = Telemetry([("first", first), ("second", second)], report)
    one_of_each(telemetry)
    telemetry.close()
    assert first.told == second.told == ["event", "metric", "span", "status", "close"]
    assert reports == []


@pytest.mark.parametrize("breaks", ["event", "metric", "span", "status"])
def test_a_sink_that_fails_is_reported_once_and_left_out(breaks: str) -> None:
    broken, sound = RecordingSink(breaks=breaks), RecordingSink()
    reports, report = reporting()
    telemetry = Telemetry([("broken", broken), ("sound", sound)], report)
    one_of_each(telemetry)
    one_of_each(telemetry)
    telemetry.close()
    assert reports == [("broken", "OSError: [Errno 28] No space left on device")]
    assert broken.told.count(breaks) == 1
    assert sound.told == [*["event", "metric", "span", "status"] * 2, "close"]


def test_a_report_may_come_back_as_an_event() -> None:
    broken, sound = RecordingSink(breaks="metric"), RecordingSink()

    def report(sink: str, message: str) -> None:
        telemetry.event(event("failed", time.time(), message=f"{sink}: {message}"))

    telemetry = Telemetry([("broken", broken), ("sound", sound)], report)
    telemetry.metric(row("on_policy", 1))
    assert [what for what in broken.told if what != "close"] == ["metric"]
    assert sound.told == ["event", "metric"]


def test_a_spec_can_ask_for_nothing(tmp_path: Path) -> None:
    run = directory(tmp_path)
    before = sorted(run.path.iterdir())
    nothing = spec("telemetry.metrics=null", "telemetry.trace=false")
    telemetry = open_sinks(nothing, run, reporting()[1])
    tell(telemetry, time.time())
    telemetry.close()
    assert telemetry.metrics_url is None
    assert sorted(run.path.iterdir()) == before


@pytest.mark.parametrize(
    ("sink", "package"),
    [
        ("tensorboard", "tensorboard"),
        ("wandb", "wandb"),
        ("otlp", "opentelemetry.sdk"),
        ("otlp", "opentelemetry.exporter.otlp.proto.http"),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sink: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    wanted = spec(f"telemetry.sinks=[{sink}]")
    expected = (
        f"telemetry.sinks: {sink} needs the package {package}, which is not installed: "
        "pip install tensorboard==2.21.0 wandb==0.31.0 opentelemetry-sdk==1.45.2 "
        "opentelemetry-exporter-otlp-proto-http==1.45.2, or leave it out"
    )
    for refuse in (
        lambda: require_sinks(wanted),
        lambda: open_sinks(wanted, directory(tmp_path), reporting()[1]),
    ):
        with pytest.raises(SpecError) as refused:
            refuse()
        assert str(refused.value) == expected


def test_trackio_comes_without_its_dependencies(monkeypatch: pytest.MonkeyPatch) -> None:
    """It pins a pillow older than ours: the command brings it beside what else it needs."""
    monkeypatch.setitem(sys.modules, "trackio", None)
    remedy = (
        "pip install --no-deps trackio==0.43.0 brotli==1.2.1 gradio-client==2.7.2 orjson==3.13.0"
    )
    with pytest.raises(SpecError, match=f"package trackio, .*: {remedy}, or leave it out"):
        require_sinks(spec("telemetry.sinks=[trackio]"))


def test_a_refusal_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    before = set(threading.enumerate())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    wanted = spec("telemetry.sinks=[otlp]", f"telemetry.metrics=127.0.0.1:{port}")
    with pytest.raises(SpecError, match="OTEL_EXPORTER_OTLP_PROTOCOL"):
        open_sinks(wanted, directory(tmp_path), reporting()[1])
    assert set(threading.enumerate()) == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


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


STARTED = time.time()


def test_what_is_unknown_has_no_sample(told: PrometheusSink) -> None:
    found = scraped(told)
    # The dead replica has no process, the teacher and the trainer were told no version.
    memory = {at["replica"] for at, _ in found["forge_replica_resident_memory_bytes"]}
    assert memory == {"generator[0]", "doc_teacher[0]", "trainer[0]"}
    versions = {at["replica"] for at, _ in found["forge_replica_version"]}
    assert versions == {"generator[0]", "generator[1]"}


def test_a_run_without_episodes_has_no_sample_of_them(sink: PrometheusSink) -> None:
    sink.metric(row("offline", 1))
    sink.event(event("step", time.time(), arm="offline", step=1, seconds={}))
    assert [name for name in scraped(sink) if name.startswith("forge_teacher_")] == []
    samples = scraped(sink)
    shown = [at["fact"] for of in ("step_value", "steps_total") for at, _ in samples[f"forge_{of}"]]
    assert [name for name in shown if name.startswith(("loss/", "episodes/"))] == ["loss/doc_kl"]


def test_counts_of_the_pools_are_mirrored_not_added(sink: PrometheusSink) -> None:
    for _ in range(3):
        sink.status(status())
    assert value(sink, "forge_replica_restarts_total", role="generator") == 1


def test_the_process_of_the_sink_is_measured(sink: PrometheusSink) -> None:
    assert value(sink, "process_resident_memory_bytes") > 10 * 2**20


def test_a_stall_is_no_progress(sink: PrometheusSink) -> None:
    at = value(sink, "forge_last_progress_timestamp_seconds")
    assert STARTED <= at <= time.time()
    for name in ("stalled", "replica_lost", "paused"):
        sink.event(event(name, time.time(), role="generator", replica="generator[0]"))
    assert value(sink, "forge_last_progress_timestamp_seconds") == at
    assert value(sink, "forge_stalls_total") == 1
    sink.event(event("publish", time.time()))
    assert value(sink, "forge_last_progress_timestamp_seconds") > at


def test_an_address_that_is_taken_is_refused_by_its_key(sink: PrometheusSink) -> None:
    address = sink.url.removeprefix("http://").removesuffix("/metrics")
    with pytest.raises(SpecError, match=rf"telemetry\.metrics: cannot listen on {address}: .*null"):
        PrometheusSink(address, "run-2", "small", staleness=0)


def test_closing_leaves_no_thread_and_no_port() -> None:
    before = set(threading.enumerate())
    sink = PrometheusSink("127.0.0.1:0", "run-1", "small", staleness=0)
    host, port = sink.url.removeprefix("http://").removesuffix("/metrics").split(":")
    # A scraper that says nothing holds up neither the others nor the end.
    with socket.create_connection((host, int(port))):
        assert scraped(sink)
        sink.close()
    while set(threading.enumerate()) != before:  # its thread sees that the scraper has hung up
        time.sleep(0.01)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))


def test_ipv6_loopback() -> None:
    sink = PrometheusSink("[::1]:0", "run-1", "small", staleness=1)
    try:
        assert sink.url.startswith("http://[::1]:")
        assert value(sink, "forge_staleness_limit_versions") == 1
    finally:
        sink.close()


def test_with_tls_members_of_the_mesh_read_it_and_strangers_do_not(tmp_path: Path) -> None:
    [own] = certificates(tmp_path / "mesh", [("w2.lan",)])
    [foreign] = certificates(tmp_path / "foreign", [("w2.lan",)])
    identity = read_identity(own, "own")
    sink = PrometheusSink("127.0.0.1:0", "run-1", "small", 0, identity.server_context)
    try:
        assert sink.url.startswith("https://127.0.0.1:")
        port = int(sink.url.split(":")[2].partition("/")[0])
        with socket.create_connection(("127.0.0.1", port)):  # silent: it keeps nobody waiting
            context = identity.client_context()
            with urllib.request.urlopen(sink.url, timeout=5, context=context) as answer:
                assert b'forge_run_info{mesh="small",run="run-1"} 1.0' in answer.read()
        for shown in (None, foreign):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            if shown is not None:
                context.load_cert_chain(shown / "tls.crt", shown / "tls.key")
            got = b""
            with contextlib.suppress(OSError):
                got = urllib.request.urlopen(sink.url, timeout=5, context=context).read()
            assert got == b""
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            urllib.request.urlopen(sink.url.replace("https", "http"), timeout=5)
    finally:
        sink.close()


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """(step, value) of a tag, as TensorBoard would draw it."""
    read = EventAccumulator(str(folder))
    read.Reload()
    return [(scalar.step, scalar.value) for scalar in read.Scalars(tag)]


def test_each_arm_is_a_run_with_its_steps(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "tensorboard")
    tell(sink, time.time())
    sink.close()
    for arm in ("on_policy", "offline"):
        folder = tmp_path / "tensorboard" / arm
        losses = scalars(folder, "loss/doc_kl")
        assert losses == [(s, pytest.approx(2.0 / s)) for s in range(1, STEPS + 1)]
        assert scalars(folder, "tokens/trained") == [(s, 100 + s) for s in range(1, STEPS + 1)]
        assert scalars(folder, "accuracy/probe") == [(STEPS, 0.75)]
        assert scalars(folder, "accuracy/greedy") == [(STEPS, 0.875)]
        assert scalars(folder, "accuracy/sampled") == [(STEPS, 0.5)]
        assert scalars(folder, "bytes/cartridges")[0] == (1, 65536)
        assert scalars(folder, "seconds/train")[0] == (1, pytest.approx(0.3))
    folder = tmp_path / "tensorboard" / "on_policy"
    assert scalars(folder, "loss/grpo") == [(s, -0.25 * s) for s in range(1, STEPS + 1)]
    assert scalars(folder, "loss/replay_dpo") == [(s, 0.5) for s in range(1, STEPS)]  # where it was
    assert scalars(folder, "grpo/grad_norm") == [(1, 0.375)]
    assert scalars(folder, "episodes/reward")[0] == (1, 0.25)
    assert scalars(folder, "dollars/opus")[-1] == (STEPS, 0.5 * STEPS)


def test_steps_done_again_after_a_resume_are_shown_once(tmp_path: Path) -> None:
    for first in (1, 3):  # resumed from the checkpoint of step 2
        sink = TensorBoardSink(tmp_path / "tensorboard")
        for step in range(first, first + 4):
            sink.metric(row("on_policy", step))
        sink.close()
    losses = scalars(tmp_path / "tensorboard" / "on_policy", "loss/doc_kl")
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]


def test_what_was_told_is_on_disk_before_the_end(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "tensorboard")
    sink.metric(row("offline", 1))
    assert scalars(tmp_path / "tensorboard" / "offline", "tokens/trained") == [(1, 101)]
    sink.close()


TRACE_NOW = 1785060942.1


def test_a_lane_for_every_replica_and_the_controller(tmp_path: Path) -> None:
    sink = TraceSink(tmp_path / "trace.json", "run-1")
    tell(sink, TRACE_NOW)
    sink.close()
    trace = read_trace(tmp_path / "trace.json")
    steps = 2 * STEPS
    assert {lane: len(slices) for lane, slices in trace.slices.items()} == {
        "controller": 4 * steps,
        "generator[0]": 2 * steps,
        "generator[1]": steps,
        "doc_teacher[0]": steps,
        "trainer[0]": steps,
    }
    first = trace.slices["generator[1]"][0]
    assert (first["name"], first["ts"], first["dur"]) == ("generate", 1785060942101000, 180000)
    assert first["args"] == {
        "request": "generator/1/1", "arm": "on_policy", "step": 1, "version": 0, "waited": 0.0,
        "attempt": 1, "outcome": "ok",
    }  # fmt: skip


def test_waiting_ends_where_the_request_begins(tmp_path: Path) -> None:
    sink = TraceSink(tmp_path / "trace.json", "run-1")
    tell(sink, TRACE_NOW)
    sink.close()
    trace = read_trace(tmp_path / "trace.json")
    assert len(trace.waits) == 2 * STEPS  # the waits of 0 s are not drawn
    assert trace.waits[0] == ("waiting for generator", 1785060942101000, 1785060942201000)
    assert trace.slices["generator[0]"][1]["ts"] == 1785060942201000


def test_deaths_are_marked_on_their_lane_and_checkpoints_across_all(tmp_path: Path) -> None:
    sink = TraceSink(tmp_path / "trace.json", "run-1")
    tell(sink, TRACE_NOW)
    sink.close()
    marks = read_trace(tmp_path / "trace.json").marks
    assert [(m["name"], m["s"]) for m in marks["generator[1]"]] == [
        ("replica_lost", "t"),
        ("replica_back", "t"),
    ]
    assert marks["generator[1]"][1]["args"]["seconds"] == 1.5
    assert marks["generator[1]"][1]["ts"] - marks["generator[1]"][0]["ts"] == 1_500_000
    names = [m["name"] for m in marks["controller"]]
    assert names == [
        "run_started", *["role_ready"] * 3, *["checkpoint", "evaluated"] * 2
    ]  # fmt: skip
    assert {m["s"] for m in marks["controller"]} == {"p"}


def test_requests_side_by_side_get_lanes_side_by_side(tmp_path: Path) -> None:
    sink = TraceSink(tmp_path / "trace.json", "run-1")
    for begin, end in ((0.0, 0.3), (0.1, 0.4), (0.4, 0.5), (0.45, 0.5)):
        sink.span(TraceSpan("generator[0]", "generate", TRACE_NOW + begin, TRACE_NOW + end, {}))
    sink.close()
    slices = read_trace(tmp_path / "trace.json").slices
    assert [s["dur"] for s in slices["generator[0]"]] == [300000, 100000]
    assert [s["dur"] for s in slices["generator[0] (2)"]] == [300000, 50000]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(0, 10), st.floats(0, 3), st.floats(0, 1)),
        max_size=30,
    )
)
def test_no_schedule_makes_slices_overlap(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, float, float, float]]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    sink = TraceSink(path, "run-1")
    for number, begin, spent, waited in spans:
        lane, facts = f"generator[{number}]", {"waited": waited}
        sink.span(TraceSpan(lane, "generate", TRACE_NOW + begin, TRACE_NOW + begin + spent, facts))
    sink.close()
    trace = read_trace(path)
    assert sum(map(len, trace.slices.values())) == len(spans)
    assert len(trace.waits) == sum(round(waited * 1e6) >= 1000 for *_, waited in spans)


@pytest.mark.parametrize("torn", ["", ",", ",\n", ',\n{"name": "gen', ',\n{"ph": "X", "args": {}'])
def test_a_resumed_run_goes_on_after_the_last_whole_event(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "trace.json"
    first = TraceSink(path, "run-1")
    tell(first, TRACE_NOW)  # no close: killed
    os.close(first._file)
    whole = read_trace(path, closed=False)
    with path.open("a") as file:
        file.write(torn)
    again = TraceSink(path, "run-1")
    tell(again, TRACE_NOW + 100)
    again.close()
    trace = read_trace(path)
    assert set(trace.slices) == set(whole.slices)  # the same lanes, not a second set
    assert all(len(trace.slices[lane]) == 2 * len(whole.slices[lane]) for lane in whole.slices)
    assert len(trace.waits) == 2 * len(whole.waits)


def test_a_closed_trace_is_taken_up_too(tmp_path: Path) -> None:
    for start in range(3):
        sink = TraceSink(tmp_path / "trace.json", "run-1")
        sink.event(event("checkpoint", TRACE_NOW + start, step=start))
        sink.close()
    marks = read_trace(tmp_path / "trace.json").marks["controller"]
    assert [m["args"]["step"] for m in marks] == [0, 1, 2]


def test_what_a_kill_leaves_opens(tmp_path: Path) -> None:
    code = (
        "import itertools, sys\n"
        "from pathlib import Path\n"
        "from telemetry_stream import tell\n"
        "from cartridge_forge.plugins.watch.telemetry.trace import TraceSink\n"
        "sink = TraceSink(Path(sys.argv[1]), 'run-1')\n"
        "for i in itertools.count():\n"
        "    tell(sink, 1785060942.1 + 100 * i)\n"
        "    print(i, flush=True)\n"
    )
    path = tmp_path / "trace.json"
    writer = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    for _ in range(3):
        writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    writer.communicate(timeout=10)
    trace = read_trace(path, closed=False)
    assert len(trace.slices["trainer[0]"]) >= 3 * 2 * STEPS
