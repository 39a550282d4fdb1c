"""Export channels, rewards, flags and external teachers of a run with episodes to Prometheus.

A run without episodes has no samples of these metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, Metric

from environments.monitors import FLAGS
from protocols.records.run_files import MetricRow

# Outcomes of preference pairs; the other "teachers/..." of a row's episodes count states.
PAIRS = ("trained", "given_up", "unsayable")


class ChannelMetrics:
    """Update metrics from rows of metrics.jsonl. Facts that a row lacks stay unchanged."""

    def __init__(self, to: CollectorRegistry) -> None:
        channel = ["arm", "channel"]
        self._denominator = Gauge(
            "forge_channel_denominator",
            "What a channel's loss was divided by in the last step, tokens or pairs; 0: no data.",
            channel, registry=to,
        )  # fmt: skip
        self._gradient = Gauge(
            "forge_channel_gradient_norm",
            "Norm of a channel's own gradient, unweighted, when gradients were last compared.",
            channel, registry=to,
        )  # fmt: skip
        self._clipped = Gauge(
            "forge_channel_clipped_ratio",
            "Share of a channel's tokens that its clip held back.",
            channel, registry=to,
        )  # fmt: skip
        self._removed = Gauge(
            "forge_channel_gradient_removed_ratio",
            "Share of a channel's gradient by its logits that its bound or clip took away.",
            channel, registry=to,
        )  # fmt: skip
        self._reward = Gauge(
            "forge_episode_reward", "Mean reward of the last step's judged episodes.",
            ["arm"], registry=to,
        )  # fmt: skip
        self._episodes = Counter(
            "forge_episodes", "Episodes, by whether they could be judged.",
            ["arm", "outcome"], registry=to,
        )  # fmt: skip
        self._flags = Counter(
            "forge_episode_flags", "Episodes that a monitor of reward hacking flagged, by flag.",
            ["arm", "flag"], registry=to,
        )  # fmt: skip
        self._states = Counter(
            "forge_replay_states", "States that teachers were asked about, by what they came to.",
            ["verdict"], registry=to,
        )  # fmt: skip
        self._pairs = Counter(
            "forge_preference_pairs", "Pairs that teachers preferred, by what became of them.",
            ["outcome"], registry=to,
        )  # fmt: skip

    def metric(self, row: MetricRow) -> None:
        for name, facts in row.channels.items():
            self._denominator.labels(row.arm, name).set(facts["count"])
            if "grad_norm" in facts:
                self._gradient.labels(row.arm, name).set(facts["grad_norm"])
            if "clipped" in facts:
                self._clipped.labels(row.arm, name).set(facts["clipped"])
            if "gradient_removed" in facts:
                self._removed.labels(row.arm, name).set(facts["gradient_removed"])
        if not row.episodes:
            return
        errored = row.episodes["errored"]
        self._episodes.labels(row.arm, "judged").inc(row.episodes["count"] - errored)
        self._episodes.labels(row.arm, "errored").inc(errored)
        if "reward" in row.episodes:
            self._reward.labels(row.arm).set(row.episodes["reward"])
        for flag in FLAGS:  # all of them: a 0 shows that the monitor ran
            self._flags.labels(row.arm, flag).inc(row.episodes.get(f"flag/{flag}", 0))
        for name, count in row.episodes.items():
            about, _, what = name.partition("/")
            if about == "teachers":
                (self._pairs if what in PAIRS else self._states).labels(what).inc(count)


class TeachersCollector:
    """Export the field `teachers` of the newest "step" event. Its counts are already cumulative
    over all starts of the run, so they are exported unchanged."""

    def __init__(self) -> None:
        self.newest: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        told = self.newest
        calls = CounterMetricFamily(
            "forge_teacher_calls", "Attempts to ask a teacher that ended, by outcome.",
            labels=["teacher", "outcome"],
        )  # fmt: skip
        for teacher, outcomes in told.get("calls", {}).items():
            for outcome, count in outcomes.items():
                calls.add_metric([teacher, outcome], count)
        spent = CounterMetricFamily(
            "forge_teacher_spent_dollars", "Dollars that a teacher's calls cost.",
            labels=["teacher"],
        )  # fmt: skip
        for teacher, dollars in told.get("dollars", {}).items():
            spent.add_metric([teacher], dollars)
        yield from (calls, spent)
