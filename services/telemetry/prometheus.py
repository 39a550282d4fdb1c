"""Serve a run's metrics to Prometheus from a registry of its own.

Names, base units and suffixes follow Prometheus' conventions. Times are exported as timestamps, so
that a stopped writer never looks fresh. Counts that the pools or the teachers keep are copied from
the newest `RunStatus` or "step" event, never counted twice. A run without episodes has no samples
of their metrics.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from environments.monitors import FLAGS
from protocols.errors import SpecError
from protocols.records.run_files import TRAINED_ARMS, MetricRow
from protocols.records.status import ReplicaState, RunStatus
from protocols.spec.mesh import RunSpec
from protocols.types import TraceSpan
from services.run_directory import RunDirectory
from services.telemetry.metrics_server import MetricsServer
from services.telemetry.values import losses, role_of
from services.tls.identity import read_identity

# Seconds, from a cached response of the tiny model to a long rollout of a large one.
BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120,
)  # fmt: skip
# Events that are no progress of the run.
NO_PROGRESS = frozenset(
    {"stalled", "paused", "resumed", "stopping", "replica_lost", "relay_lost", "failed"}
)
# Outcomes of preference pairs; the other "teachers/..." of a row's episodes count states.
PAIRS = ("trained", "given_up", "unsayable")

# Name -> labels, help text.
GAUGES = {
    "forge_run_info": ("run mesh", "Which run this is."),
    "forge_staleness_limit_versions": (
        "", "Most versions a trained token may be behind; 0 is strict on policy.",
    ),
    "forge_training_loss": (
        "arm channel",
        "Loss of a channel in its last step with data, over its own denominator; of doc_kl in nats "
        "a token.",
    ),
    "forge_gradient_norm": ("arm", "Norm of the last step's gradient before clipping."),
    "forge_learning_rate": ("arm", "Learning rate of the last step."),
    "forge_training_step": ("arm", "Last finished step, from 1 in each arm."),
    "forge_accuracy_ratio": (
        "arm questions decoding", "Share of questions answered right when last asked.",
    ),
    "forge_document_hit_ratio": (
        "", "Share of the last step's look-ups of documents' KV for which none was read.",
    ),
    "forge_last_checkpoint_timestamp_seconds": ("", "When the last checkpoint was written."),
    "forge_last_progress_timestamp_seconds": ("", "When the run last got on."),
    "forge_channel_denominator": (
        "arm channel",
        "What a channel's loss was divided by in the last step, tokens or pairs; 0: no data.",
    ),
    "forge_channel_gradient_norm": (
        "arm channel",
        "Norm of a channel's own gradient, unweighted, when gradients were last compared.",
    ),
    "forge_channel_clipped_ratio": (
        "arm channel",
        "Share of a channel's tokens that its clip held back.",
    ),
    "forge_channel_gradient_removed_ratio": (
        "arm channel",
        "Share of a channel's gradient by its logits that its bound or clip took away.",
    ),
    "forge_sampler_gap_nats": (
        "arm of",
        "Distance of the sampler's log-probabilities from the trainer's in the last step, mean and "
        "largest of a token, and its signed mean.",
    ),
    "forge_episode_reward": ("arm", "Mean reward of the last step's judged episodes."),
}  # fmt: skip
COUNTERS = {
    "forge_trained_tokens": ("arm", "Tokens trained."),
    "forge_stale_tokens": ("arm", "Trained tokens sampled by an older version."),
    "forge_rollouts": ("arm", "Responses that were trained on."),
    "forge_plane_bytes": ("tensors", "Bytes moved over the tensor plane, by what they were."),
    "forge_document_lookups": (
        "found",
        "Times the document teacher needed a document's KV, by where it was: on its device, in "
        "host memory, or nowhere, so that it was read.",
    ),
    "forge_document_evictions": ("", "Documents whose KV left a document teacher's device."),
    "forge_hidden_seconds": ("arm", "Seconds that teachers computed beside rollouts."),
    "forge_checkpoints": ("", "Checkpoints written."),
    "forge_stalls": ("", "Times the watchdog found no progress."),
    "forge_episodes": ("arm outcome", "Episodes, by whether they could be judged."),
    "forge_episode_flags": (
        "arm flag", "Episodes that a monitor of reward hacking flagged, by flag.",
    ),
    "forge_replay_states": (
        "verdict", "States that teachers were asked about, by what they came to.",
    ),
    "forge_preference_pairs": (
        "outcome", "Pairs that teachers preferred, by what became of them.",
    ),
}  # fmt: skip
HISTOGRAMS = {
    "forge_step_phase_duration_seconds": (
        "arm phase", "Wall time of one phase of a training step.",
    ),
    "forge_step_duration_seconds": ("arm", "Wall time of a whole training step."),
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
        arm = event["arm"]
        for phase, seconds in event["seconds"].items():
            if phase == "step":
                self._at("forge_step_duration_seconds", arm).observe(seconds)
            else:
                self._at("forge_step_phase_duration_seconds", arm, phase).observe(seconds)
        self._at("forge_training_step", arm).set(event["step"])
        if "rollouts" in event:
            self._at("forge_rollouts", arm).inc(event["rollouts"])
        if "teachers" in event:
            self._copied.teachers = event["teachers"]
        for tensors, count in event.get("bytes", {}).items():
            self._at("forge_plane_bytes", tensors).inc(count)
        self._at("forge_hidden_seconds", arm).inc(event.get("hidden", 0.0))
        if "documents" in event:
            self._lookups(**event["documents"])

    def _lookups(self, hits: int, host_hits: int, misses: int, evictions: int) -> None:
        for found, count in (("device", hits), ("host", host_hits), ("nowhere", misses)):
            self._at("forge_document_lookups", found).inc(count)
        self._at("forge_document_evictions").inc(evictions)
        if total := hits + host_hits + misses:
            self._at("forge_document_hit_ratio").set((hits + host_hits) / total)

    def metric(self, row: MetricRow) -> None:
        """Update the metrics of a step. A fact that the row lacks leaves its metric unchanged."""
        for channel, loss in losses(row).items():
            self._at("forge_training_loss", row.arm, channel).set(loss)
        for channel, facts in row.channels.items():
            self._at("forge_channel_denominator", row.arm, channel).set(facts["count"])
            if "grad_norm" in facts:
                self._at("forge_channel_gradient_norm", row.arm, channel).set(facts["grad_norm"])
            if "clipped" in facts:
                self._at("forge_channel_clipped_ratio", row.arm, channel).set(facts["clipped"])
            if "gradient_removed" in facts:
                removed = self._at("forge_channel_gradient_removed_ratio", row.arm, channel)
                removed.set(facts["gradient_removed"])
        if row.episodes:
            self._episodes(row.arm, row.episodes)
        self._at("forge_gradient_norm", row.arm).set(row.grad_norm)
        self._at("forge_learning_rate", row.arm).set(row.lr)
        self._at("forge_trained_tokens", row.arm).inc(row.tokens)
        self._at("forge_stale_tokens", row.arm).inc(row.stale_tokens)
        for of in ("mean", "signed", "max"):
            if of in row.sampler_gap:
                self._at("forge_sampler_gap_nats", row.arm, of).set(row.sampler_gap[of])
        if row.accuracy is not None:
            self._at("forge_accuracy_ratio", row.arm, "probe", "greedy").set(row.accuracy)

    def _episodes(self, arm: str, episodes: Mapping[str, float]) -> None:
        errored = episodes["errored"]
        self._at("forge_episodes", arm, "judged").inc(episodes["count"] - errored)
        self._at("forge_episodes", arm, "errored").inc(errored)
        if "reward" in episodes:
            self._at("forge_episode_reward", arm).set(episodes["reward"])
        for flag in FLAGS:  # all of them: a 0 shows that the monitor ran
            self._at("forge_episode_flags", arm, flag).inc(episodes.get(f"flag/{flag}", 0))
        for name, count in episodes.items():
            about, _, what = name.partition("/")
            if about == "teachers":
                metric = "forge_preference_pairs" if what in PAIRS else "forge_replay_states"
                self._at(metric, what).inc(count)

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
            here = sum(replica.state == state for replica in pool.replicas)
            yield "forge_replicas", [role, state.value], here
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
