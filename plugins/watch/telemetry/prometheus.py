"""Serve a run's metrics to Prometheus from a registry of its own.

Names, base units and suffixes follow Prometheus' conventions. The numbers of a step have one gauge
and one counter, by the names of `hub.row_values` and `hub.step_values`: a new number needs nothing
here. Times are exported as timestamps, so that a stopped writer never looks fresh. Counts that the
pools or the teachers keep are copied from the newest `RunStatus` or "step" event, never counted
twice.

`MetricsServer` answers over HTTP, or to the members of a mesh alone by TLS. The client library's
own server shakes hands before it takes the next connection, so that one silent client would stop
every scrape.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cartridge_forge.plugins.host.tls import read_identity
from cartridge_forge.plugins.host.tls_listener import POLL_SECONDS, MutualTlsRequests
from cartridge_forge.plugins.watch.telemetry.hub import role_of, row_values, step_values
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.ports import TraceSpan
from cartridge_forge.protocols.records.run_files import TRAINED_ARMS, MetricRow
from cartridge_forge.protocols.records.status import ReplicaState, RunStatus
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.run_directory import RunDirectory

REQUEST_SECONDS = 30.0  # for a scraper to send its request


class MetricsListener(MutualTlsRequests, WSGIServer):
    """Listen on an IPv4 address, or a name that has one."""


class MetricsListener6(MetricsListener):
    """Listen on an IPv6 address."""

    address_family = socket.AF_INET6


class QuietRequests(WSGIRequestHandler):
    """Log no scrape: one comes every few seconds."""

    timeout = REQUEST_SECONDS

    def log_message(self, format: str, *args: object) -> None:
        pass


class MetricsServer:
    """Serve `registry` at `url` from a thread, until it is closed. `address` is host:port; port 0
    takes a free one. With `context` it admits TLS alone, by the context's rules. Raises OSError for
    an address that it cannot listen on."""

    def __init__(
        self,
        address: str,
        registry: CollectorRegistry,
        context: Callable[[], ssl.SSLContext] | None,
    ) -> None:
        host, _, port = address.rpartition(":")
        listener = MetricsListener6 if ":" in host else MetricsListener
        app = make_wsgi_app(registry)
        self._server = make_server(host.strip("[]"), int(port), app, listener, QuietRequests)
        self._server.context = context
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_SECONDS,), daemon=True
        )
        self._thread.start()
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop listening. A scrape in progress ends on its own thread."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


# Seconds, from a cached response of the tiny model to a long rollout of a large one.
BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120,
)  # fmt: skip
# Events that are no progress of the run.
NO_PROGRESS = frozenset(
    {"stalled", "paused", "resumed", "stopping", "replica_lost", "relay_lost", "failed"}
)
# Facts of a step that are added up over the steps, by the first part of their names.
SUMMED = (
    "steps", "rollouts", "tokens", "episodes", "documents", "bytes", "seconds", "hidden_seconds",
)  # fmt: skip

# Name -> labels, help text.
GAUGES = {
    "forge_run_info": ("run mesh", "Which run this is."),
    "forge_staleness_limit_versions": (
        "", "Most versions a trained token may be behind; 0 is strict on policy.",
    ),
    "forge_training_step": ("arm", "Last finished step, from 1 in each arm."),
    "forge_step_value": (
        "arm fact",
        "Every number of an arm's last step, by its name in TensorBoard and W&B: loss/doc_kl (of "
        "the last step with data), grpo/clipped, episodes/reward, optimizer/grad_norm, "
        "sampler_gap/mean.",
    ),
    "forge_accuracy_ratio": (
        "arm questions decoding", "Share of questions answered right when last asked.",
    ),
    "forge_last_checkpoint_timestamp_seconds": ("", "When the last checkpoint was written."),
    "forge_last_progress_timestamp_seconds": ("", "When the run last got on."),
}  # fmt: skip
COUNTERS = {
    "forge_steps": (
        "arm fact",
        "Counts, bytes and seconds of an arm's steps, added up, by the same names: steps, "
        "rollouts, tokens/trained, tokens/stale, episodes/count, documents/misses, bytes/scores, "
        "seconds/train, hidden_seconds (of teachers, beside rollouts).",
    ),
    "forge_checkpoints": ("", "Checkpoints written."),
    "forge_stalls": ("", "Times the watchdog found no progress."),
}
HISTOGRAMS = {
    "forge_request_duration_seconds": (
        "role method outcome", "Time a replica took over one attempt of a request.",
    ),
    "forge_request_wait_seconds": ("role method", "Time a request waited for a replica."),
    "forge_replica_recovery_seconds": ("role", "From the loss of a replica until one stood in."),
}  # fmt: skip
# Name -> labels, help text of what is copied at each scrape.
COPIED_GAUGES = {
    "forge_run_paused": ("", "1 while the run is held."),
    "forge_trainer_version": ("", "Version of the trainer's cartridges."),
    "forge_arm_active": ("arm", "1 for the arm that trains now."),
    "forge_replicas": ("role state", "Replicas by state."),
    "forge_pool_target_replicas": ("role", "Replicas a pool should have."),
    "forge_requests_waiting": ("role", "Requests that no replica has yet."),
    "forge_replica_ongoing_requests": ("role replica", "Requests a replica works on."),
    "forge_replica_resident_memory_bytes": ("role replica", "Resident memory of a replica."),
    "forge_replica_version": ("role replica", "Newest version a replica was told."),
    "forge_replica_staleness_versions": ("role replica", "Trainer's version less the replica's."),
}
COPIED_COUNTERS = {
    "forge_requests": ("role outcome", "Requests that ended, by outcome."),
    "forge_request_retries": ("role", "Attempts after a request's first."),
    "forge_replica_restarts": ("role", "Replicas that died and were replaced."),
    "forge_engine_deaths": ("role", "Of these, replicas whose engine died in a step."),
    "forge_teacher_calls": ("teacher outcome", "Attempts to ask a teacher that ended, by outcome."),
    "forge_teacher_spent_dollars": ("teacher", "Dollars that a teacher's calls cost."),
}

# Drops the "_created" series of each counter and histogram, which nothing reads.
disable_created_metrics()


class PrometheusSink:
    """Serve `/metrics` at `url` until it is closed.

    `address` is host:port; port 0 takes a free one. `staleness` is the most versions that a trained
    token may be behind. With `context` it admits TLS alone, by the context's rules. Raises
    SpecError for an address that it cannot listen on.
    """

    def __init__(
        self,
        address: str,
        run: str,
        mesh: str,
        staleness: int,
        context: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        histogram = partial(Histogram, buckets=BUCKETS)
        kinds: Iterable[tuple[Callable[..., Any], Mapping[str, tuple[str, str]]]] = (
            (Gauge, GAUGES), (Counter, COUNTERS), (histogram, HISTOGRAMS),
        )  # fmt: skip
        for kind, families in kinds:
            for name, (labels, text) in families.items():
                self._metrics[name] = kind(name, text, labels.split(), registry=self.registry)
        self._copied = CopiedMetrics()
        self.registry.register(self._copied)
        ProcessCollector(registry=self.registry)
        self._at("forge_run_info", run, mesh).set(1)
        self._at("forge_staleness_limit_versions").set(staleness)
        self._progressed()
        try:
            self._server = MetricsServer(address, self.registry, context)
        except OSError as error:
            raise SpecError(
                f"telemetry.metrics: cannot listen on {address}: {error}; choose another address, "
                "127.0.0.1:0 for any free port, or null for no metrics"
            ) from error
        self.url = self._server.url

    def event(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "step":
                self._step(event)
            case "evaluated":
                accuracy = "forge_accuracy_ratio", event["arm"], "held_out"
                self._at(*accuracy, "greedy").set(event["accuracy"])
                if event.get("sampled") is not None:
                    self._at(*accuracy, "sampled").set(event["sampled"]["accuracy"])
            case "checkpoint":
                self._at("forge_checkpoints").inc()
                self._at("forge_last_checkpoint_timestamp_seconds").set_to_current_time()
            case "replica_back":
                recovery = self._at("forge_replica_recovery_seconds", event["role"])
                recovery.observe(event["seconds"])
            case "stalled":
                self._at("forge_stalls").inc()
        if event["event"] not in NO_PROGRESS:
            self._progressed()

    def _step(self, event: Mapping[str, Any]) -> None:
        self._at("forge_training_step", event["arm"]).set(event["step"])
        self._copied.teachers = event.get("teachers", self._copied.teachers)
        documents = {f"documents/{name}": n for name, n in event.get("documents", {}).items()}
        counts = {
            "steps": 1,
            "rollouts": event.get("rollouts", 0),
            "hidden_seconds": event.get("hidden", 0.0),
        }
        self._show(event["arm"], {**step_values(event), **documents, **counts})

    def metric(self, row: MetricRow) -> None:
        """Update the metrics of a step. A fact that the row lacks leaves its metric unchanged."""
        self._show(row.arm, row_values(row))
        if row.accuracy is not None:
            self._at("forge_accuracy_ratio", row.arm, "probe", "greedy").set(row.accuracy)

    def _show(self, arm: str, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._at("forge_step_value", arm, name).set(value)
            if name.partition("/")[0] in SUMMED and value >= 0:
                self._at("forge_steps", arm, name).inc(value)

    def span(self, span: TraceSpan) -> None:
        self._progressed()
        if "request" not in span.facts:
            return  # a phase: its "step" event has the same seconds
        role, outcome = role_of(span.lane), str(span.facts["outcome"])
        duration = self._at("forge_request_duration_seconds", role, span.name, outcome)
        duration.observe(max(0.0, span.end - span.begin))
        wait = self._at("forge_request_wait_seconds", role, span.name)
        wait.observe(float(span.facts["waited"]))

    def status(self, status: RunStatus) -> None:
        self._copied.status = status

    def close(self) -> None:
        """Stop listening. A scrape in progress ends on its own thread."""
        self._server.close()

    def _at(self, name: str, *labels: str) -> Any:
        """Return the metric of that name with those values of its labels."""
        return self._metrics[name].labels(*labels) if labels else self._metrics[name]

    def _progressed(self) -> None:
        self._at("forge_last_progress_timestamp_seconds").set_to_current_time()


class CopiedMetrics:
    """Export the newest `RunStatus`, and the field `teachers` of the newest "step" event, when
    scraped. Their counts are already cumulative, so they are exported unchanged. Both are replaced
    whole: the thread of a scrape reads the old one or the new one."""

    def __init__(self) -> None:
        self.status = RunStatus()
        self.teachers: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
            name: GaugeMetricFamily(name, text, labels=labels.split())
            for name, (labels, text) in COPIED_GAUGES.items()
        }
        for name, (labels, text) in COPIED_COUNTERS.items():
            families[name] = CounterMetricFamily(name, text, labels=labels.split())
        for name, at, value in (*_status_samples(self.status), *_teacher_samples(self.teachers)):
            families[name].add_metric(at, value)
        yield from families.values()


MetricSample = tuple[str, list[str], float]
"""Name, values of the labels, value."""


def _status_samples(status: RunStatus) -> Iterator[MetricSample]:
    yield "forge_run_paused", [], status.paused
    yield "forge_trainer_version", [], status.version
    for arm in TRAINED_ARMS:
        yield "forge_arm_active", [arm], status.arm == arm and not status.done
    for pool in status.pools:
        role = pool.role
        for state in ReplicaState:
            count = sum(replica.state == state for replica in pool.replicas)
            yield "forge_replicas", [role, state.value], count
        yield "forge_pool_target_replicas", [role], pool.target
        yield "forge_requests_waiting", [role], pool.waiting
        yield "forge_requests", [role, "ok"], pool.requests
        yield "forge_requests", [role, "error"], pool.failures
        yield "forge_request_retries", [role], pool.retries
        yield "forge_replica_restarts", [role], pool.restarts
        yield "forge_engine_deaths", [role], pool.engine_deaths
        for replica in pool.replicas:
            at = [role, replica.name]
            yield "forge_replica_ongoing_requests", at, replica.ongoing
            if replica.pid:
                yield "forge_replica_resident_memory_bytes", at, replica.memory_bytes
            if replica.version >= 0:
                yield "forge_replica_version", at, replica.version
                yield "forge_replica_staleness_versions", at, status.version - replica.version


def _teacher_samples(teachers: Mapping[str, Any]) -> Iterator[MetricSample]:
    for teacher, outcomes in teachers.get("calls", {}).items():
        for outcome, count in outcomes.items():
            yield "forge_teacher_calls", [teacher, outcome], count
    for teacher, dollars in teachers.get("dollars", {}).items():
        yield "forge_teacher_spent_dollars", [teacher], dollars


def open_sink(spec: RunSpec, directory: RunDirectory) -> PrometheusSink:
    """Serve a run's metrics at `telemetry.metrics`, with TLS where that is set. Raises SpecError
    where it cannot listen."""
    wanted, context = spec.mesh.telemetry, None
    assert wanted.metrics is not None
    if wanted.tls is not None:
        context = read_identity(Path(wanted.tls), "telemetry.tls").server_context
    staleness = spec.learn.train.staleness
    return PrometheusSink(wanted.metrics, directory.id, spec.mesh.name, staleness, context)
