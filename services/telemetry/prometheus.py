"""Serve a run's metrics to Prometheus from a registry of its own.

Names, base units and suffixes follow Prometheus' conventions. Times are exported as timestamps, so
that a stopped writer never looks fresh. Counts that the pools keep are copied from the newest
`RunStatus`, never counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from protocols.errors import SpecError
from protocols.records.run_files import TRAINED_ARMS, MetricRow
from protocols.records.status import ReplicaState, RunStatus
from protocols.types import TraceSpan
from services.telemetry.prometheus_channels import ChannelMetrics, TeachersCollector
from services.telemetry.values import losses, role_of

# Seconds, from a cached response of the tiny model to a long rollout of a large one.
BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120,
)  # fmt: skip
# Events that are no progress of the run.
NO_PROGRESS = frozenset({"stalled", "paused", "resumed", "stopping", "replica_lost", "failed"})

# Drops the "_created" series of each counter and histogram, which nothing reads.
disable_created_metrics()


class PrometheusSink:
    """Serve `/metrics` at `url` until it is closed.

    `address` is host:port; port 0 takes a free one. `staleness` is the most versions that a trained
    token may be behind. Raises SpecError for an address that it cannot listen on.
    """

    def __init__(self, address: str, run: str, mesh: str, staleness: int) -> None:
        self.registry = CollectorRegistry()
        self._families(run, mesh, staleness)
        self._channels = ChannelMetrics(self.registry)
        self._teachers = TeachersCollector()
        self.registry.register(self._teachers)
        self._pools = StatusCollector()
        self.registry.register(self._pools)
        ProcessCollector(registry=self.registry)
        host, _, port = address.rpartition(":")
        try:
            self._server, self._thread = start_http_server(
                int(port), host.strip("[]"), self.registry
            )
        except OSError as error:
            raise SpecError(
                f"telemetry.metrics: cannot listen on {address}: {error}; choose another address, "
                "127.0.0.1:0 for any free port, or null for no metrics"
            ) from error
        # Print no traceback for a scraper or a probe that disconnects.
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def _families(self, run: str, mesh: str, staleness: int) -> None:
        to = self.registry
        info = Gauge("forge_run_info", "Which run this is.", ["run", "mesh"], registry=to)
        info.labels(run, mesh).set(1)
        Gauge(
            "forge_staleness_limit_versions",
            "Most versions a trained token may be behind; 0 is strict on policy.",
            registry=to,
        ).set(staleness)
        self._phase = Histogram(
            "forge_step_phase_duration_seconds", "Wall time of one phase of a training step.",
            ["arm", "phase"], buckets=BUCKETS, registry=to,
        )  # fmt: skip
        self._step = Histogram(
            "forge_step_duration_seconds", "Wall time of a whole training step.",
            ["arm"], buckets=BUCKETS, registry=to,
        )  # fmt: skip
        self._loss = Gauge(
            "forge_training_loss",
            "Loss of a channel in its last step with data, over its own denominator; of doc_kl in "
            "nats a token.",
            ["arm", "channel"], registry=to,
        )  # fmt: skip
        self._gradient = Gauge(
            "forge_gradient_norm", "Norm of the last step's gradient before clipping.",
            ["arm"], registry=to,
        )  # fmt: skip
        self._rate = Gauge(
            "forge_learning_rate", "Learning rate of the last step.", ["arm"], registry=to
        )
        self._last_step = Gauge(
            "forge_training_step", "Last finished step, from 1 in each arm.", ["arm"], registry=to
        )
        self._tokens = Counter("forge_trained_tokens", "Tokens trained.", ["arm"], registry=to)
        self._stale = Counter(
            "forge_stale_tokens", "Trained tokens sampled by an older version.",
            ["arm"], registry=to,
        )  # fmt: skip
        self._gap = Gauge(
            "forge_sampler_gap_nats",
            "Distance of the sampler's log-probabilities from the trainer's in the last step, mean "
            "and largest of a token, and its signed mean.",
            ["arm", "of"], registry=to,
        )  # fmt: skip
        self._rollouts = Counter(
            "forge_rollouts", "Responses that were trained on.", ["arm"], registry=to
        )
        self._accuracy = Gauge(
            "forge_accuracy_ratio", "Share of questions answered right when last asked.",
            ["arm", "questions", "decoding"], registry=to,
        )  # fmt: skip
        self._bytes = Counter(
            "forge_plane_bytes", "Bytes moved over the tensor plane, by what they were.",
            ["tensors"], registry=to,
        )  # fmt: skip
        self._lookups = Counter(
            "forge_document_lookups",
            "Times the document teacher needed a document's KV, by where it was: on its device, in "
            "host memory, or nowhere, so that it was read.",
            ["found"], registry=to,
        )  # fmt: skip
        self._evictions = Counter(
            "forge_document_evictions", "Documents whose KV left a document teacher's device.",
            registry=to,
        )  # fmt: skip
        self._hit_ratio = Gauge(
            "forge_document_hit_ratio",
            "Share of the last step's look-ups of documents' KV for which none was read.",
            registry=to,
        )  # fmt: skip
        self._hidden = Counter(
            "forge_hidden_seconds", "Seconds that teachers computed beside rollouts.",
            ["arm"], registry=to,
        )  # fmt: skip
        self._request = Histogram(
            "forge_request_duration_seconds", "Time a replica took over one attempt of a request.",
            ["role", "method", "outcome"], buckets=BUCKETS, registry=to,
        )  # fmt: skip
        self._waited = Histogram(
            "forge_request_wait_seconds", "Time a request waited for a replica.",
            ["role", "method"], buckets=BUCKETS, registry=to,
        )  # fmt: skip
        self._recovery = Histogram(
            "forge_replica_recovery_seconds", "From the loss of a replica until one stood in.",
            ["role"], buckets=BUCKETS, registry=to,
        )  # fmt: skip
        self._checkpoints = Counter("forge_checkpoints", "Checkpoints written.", registry=to)
        self._checkpoint_at = Gauge(
            "forge_last_checkpoint_timestamp_seconds", "When the last checkpoint was written.",
            registry=to,
        )  # fmt: skip
        self._stalls = Counter("forge_stalls", "Times the watchdog found no progress.", registry=to)
        self._progress_at = Gauge(
            "forge_last_progress_timestamp_seconds", "When the run last got on.", registry=to
        )
        self._progress_at.set_to_current_time()

    def event(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "step":
                self._stepped(event)
            case "evaluated":
                self._accuracy.labels(event["arm"], "held_out", "greedy").set(event["accuracy"])
                if event.get("sampled") is not None:
                    sampled = event["sampled"]["accuracy"]
                    self._accuracy.labels(event["arm"], "held_out", "sampled").set(sampled)
            case "checkpoint":
                self._checkpoints.inc()
                self._checkpoint_at.set_to_current_time()
            case "replica_back":
                self._recovery.labels(event["role"]).observe(event["seconds"])
            case "stalled":
                self._stalls.inc()
        if event["event"] not in NO_PROGRESS:
            self._progress_at.set_to_current_time()

    def _stepped(self, event: Mapping[str, Any]) -> None:
        arm = event["arm"]
        for phase, seconds in event["seconds"].items():
            whole = phase == "step"
            (self._step.labels(arm) if whole else self._phase.labels(arm, phase)).observe(seconds)
        self._last_step.labels(arm).set(event["step"])
        if "rollouts" in event:
            self._rollouts.labels(arm).inc(event["rollouts"])
        if "teachers" in event:
            self._teachers.newest = event["teachers"]
        for tensors, count in event.get("bytes", {}).items():
            self._bytes.labels(tensors).inc(count)
        self._hidden.labels(arm).inc(event.get("hidden", 0.0))
        if "documents" in event:
            self._looked_up(**event["documents"])

    def _looked_up(self, hits: int, host_hits: int, misses: int, evictions: int) -> None:
        for found, count in (("device", hits), ("host", host_hits), ("nowhere", misses)):
            self._lookups.labels(found).inc(count)
        self._evictions.inc(evictions)
        if hits + host_hits + misses:
            self._hit_ratio.set((hits + host_hits) / (hits + host_hits + misses))

    def metric(self, row: MetricRow) -> None:
        for channel, loss in losses(row).items():
            self._loss.labels(row.arm, channel).set(loss)
        self._channels.metric(row)
        self._gradient.labels(row.arm).set(row.grad_norm)
        self._rate.labels(row.arm).set(row.lr)
        self._tokens.labels(row.arm).inc(row.tokens)
        self._stale.labels(row.arm).inc(row.stale_tokens)
        for of in ("mean", "signed", "max"):
            if of in row.sampler_gap:
                self._gap.labels(row.arm, of).set(row.sampler_gap[of])
        if row.accuracy is not None:
            self._accuracy.labels(row.arm, "probe", "greedy").set(row.accuracy)

    def span(self, span: TraceSpan) -> None:
        self._progress_at.set_to_current_time()
        if "request" not in span.facts:
            return  # a phase: its "step" event has the same seconds
        role = role_of(span.lane)
        outcome = str(span.facts["outcome"])
        self._request.labels(role, span.name, outcome).observe(max(0.0, span.end - span.begin))
        self._waited.labels(role, span.name).observe(float(span.facts["waited"]))

    def status(self, status: RunStatus) -> None:
        self._pools.newest = status

    def close(self) -> None:
        """Stop listening. A scrape in progress ends on its own thread."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class StatusCollector:
    """Export the newest `RunStatus` when scraped. Its counts are already cumulative, so they are
    exported unchanged. A status is frozen and replaced whole: the thread of a scrape reads the old
    one or the new one."""

    def __init__(self) -> None:
        self.newest = RunStatus()

    def collect(self) -> Iterator[Metric]:
        status = self.newest
        yield GaugeMetricFamily(
            "forge_run_paused", "1 while the run is held.", value=float(status.paused)
        )
        yield GaugeMetricFamily(
            "forge_trainer_version", "Version of the trainer's cartridges.", value=status.version
        )
        active = GaugeMetricFamily(
            "forge_arm_active", "1 for the arm that trains now.", labels=["arm"]
        )
        for arm in TRAINED_ARMS:
            training = status.arm == arm and not status.done
            active.add_metric([arm], float(training))
        yield active
        yield from self._by_role(status)
        yield from self._by_replica(status)

    def _by_role(self, status: RunStatus) -> Iterator[Metric]:
        states = GaugeMetricFamily("forge_replicas", "Replicas by state.", labels=["role", "state"])
        target = GaugeMetricFamily(
            "forge_pool_target_replicas", "Replicas a pool should have.", labels=["role"]
        )
        waiting = GaugeMetricFamily(
            "forge_requests_waiting", "Requests that no replica has yet.", labels=["role"]
        )
        requests = CounterMetricFamily(
            "forge_requests", "Requests that ended, by outcome.", labels=["role", "outcome"]
        )
        retries = CounterMetricFamily(
            "forge_request_retries", "Attempts after a request's first.", labels=["role"]
        )
        restarts = CounterMetricFamily(
            "forge_replica_restarts", "Replicas that died and were replaced.", labels=["role"]
        )
        for pool in status.pools:
            for state in ReplicaState:
                here = sum(replica.state == state for replica in pool.replicas)
                states.add_metric([pool.role, state.value], here)
            target.add_metric([pool.role], pool.target)
            waiting.add_metric([pool.role], pool.waiting)
            requests.add_metric([pool.role, "ok"], pool.requests)
            requests.add_metric([pool.role, "error"], pool.failures)
            retries.add_metric([pool.role], pool.retries)
            restarts.add_metric([pool.role], pool.restarts)
        yield from (states, target, waiting, requests, retries, restarts)

    def _by_replica(self, status: RunStatus) -> Iterator[Metric]:
        labels = ["role", "replica"]
        ongoing = GaugeMetricFamily(
            "forge_replica_ongoing_requests", "Requests a replica works on.", labels=labels
        )
        memory = GaugeMetricFamily(
            "forge_replica_resident_memory_bytes", "Resident memory of a replica.", labels=labels
        )
        version = GaugeMetricFamily(
            "forge_replica_version", "Newest version a replica was told.", labels=labels
        )
        behind = GaugeMetricFamily(
            "forge_replica_staleness_versions", "Trainer's version less the replica's.",
            labels=labels,
        )  # fmt: skip
        for pool in status.pools:
            for replica in pool.replicas:
                at = [pool.role, replica.name]
                ongoing.add_metric(at, replica.ongoing)
                if replica.pid:
                    memory.add_metric(at, replica.memory_bytes)
                if replica.version >= 0:
                    version.add_metric(at, replica.version)
                    behind.add_metric(at, status.version - replica.version)
        yield from (ongoing, memory, version, behind)
