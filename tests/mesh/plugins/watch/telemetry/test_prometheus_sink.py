"""/metrics: the values, over HTTP, as the client library's own parser reads them."""

from __future__ import annotations

import pytest
from rooms.services.sinks_setup import Labels, value
from telemetry_stream import MEMORY, STEPS

from cartridge_forge.plugins.watch.telemetry.prometheus import PrometheusSink


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("forge_run_info", {"run": "run-1", "mesh": "small"}, 1),
        ("forge_staleness_limit_versions", {}, 0),
        ("forge_steps_total", {"arm": "offline", "fact": "seconds/train"}, 4 * 0.3),
        ("forge_steps_total", {"arm": "offline", "fact": "steps"}, 4),
        ("forge_steps_total", {"arm": "on_policy", "fact": "seconds/step"}, 4 * 0.62),
        ("forge_step_value", {"arm": "on_policy", "fact": "loss/doc_kl"}, 0.5),
        ("forge_step_value", {"arm": "on_policy", "fact": "loss/grpo"}, -1.0),
        ("forge_step_value", {"fact": "loss/replay_dpo"}, 0.5),  # of the last with data
        ("forge_step_value", {"fact": "replay_dpo/count"}, 0),
        ("forge_step_value", {"fact": "doc_kl/count"}, 104),
        ("forge_step_value", {"fact": "grpo/grad_norm"}, 0.375),  # of the first step
        ("forge_step_value", {"fact": "grpo/clipped"}, 0.125),
        ("forge_step_value", {"fact": "sdpo/gradient_removed"}, 0.25),
        ("forge_step_value", {"arm": "on_policy", "fact": "episodes/reward"}, 0.25),
        ("forge_steps_total", {"arm": "on_policy", "fact": "episodes/count"}, 4 * 8),
        ("forge_steps_total", {"arm": "on_policy", "fact": "episodes/errored"}, 4),
        ("forge_steps_total", {"arm": "on_policy", "fact": "episodes/flag/copied"}, 4 * 2),
        # Counts since the run began, as the last step told them.
        ("forge_teacher_calls_total", {"teacher": "opus", "outcome": "answered"}, 3 * STEPS),
        ("forge_teacher_calls_total", {"teacher": "opus", "outcome": "http_500"}, 1),
        ("forge_teacher_spent_dollars_total", {"teacher": "opus"}, 0.5 * STEPS),
        ("forge_steps_total", {"fact": "episodes/teachers/pair"}, 2 * STEPS),
        ("forge_steps_total", {"fact": "episodes/teachers/tie"}, STEPS),
        ("forge_steps_total", {"fact": "episodes/teachers/trained"}, 2 * STEPS),
        ("forge_step_value", {"arm": "on_policy", "fact": "optimizer/grad_norm"}, 4.5),
        ("forge_step_value", {"arm": "on_policy", "fact": "optimizer/learning_rate"}, 0.02),
        ("forge_training_step", {"arm": "offline"}, STEPS),
        ("forge_steps_total", {"arm": "on_policy", "fact": "tokens/trained"}, 410),  # 101 to 104
        ("forge_steps_total", {"arm": "on_policy", "fact": "tokens/stale"}, 0),
        ("forge_steps_total", {"arm": "on_policy", "fact": "rollouts"}, 24),
        ("forge_accuracy_ratio", {"arm": "on_policy", "questions": "probe"}, 0.75),
        ("forge_accuracy_ratio", {"arm": "offline", "decoding": "sampled"}, 0.5),
        ("forge_steps_total", {"arm": "offline", "fact": "bytes/scores"}, 4 * 4096),
        ("forge_steps_total", {"arm": "on_policy", "fact": "bytes/cartridges"}, 4 * 65536),
        ("forge_steps_total", {"arm": "on_policy", "fact": "documents/hits"}, 4 * 5),
        ("forge_steps_total", {"arm": "on_policy", "fact": "documents/host_hits"}, 4),
        ("forge_steps_total", {"arm": "on_policy", "fact": "documents/misses"}, 4 * 2),
        ("forge_steps_total", {"arm": "on_policy", "fact": "documents/evictions"}, 4 * 3),
        ("forge_steps_total", {"arm": "on_policy", "fact": "hidden_seconds"}, 4 * 0.0625),
        ("forge_request_duration_seconds_count",
         {"role": "generator", "method": "generate", "outcome": "ok"}, 24),
        ("forge_request_duration_seconds_sum",
         {"role": "trainer", "method": "step", "outcome": "ok"}, 8 * 0.298),
        ("forge_request_wait_seconds_sum", {"role": "generator", "method": "generate"}, 8 * 0.1),
        ("forge_replica_recovery_seconds_sum", {"role": "generator"}, 1.5),
        ("forge_checkpoints_total", {}, 2),
        ("forge_stalls_total", {}, 0),
        ("forge_run_paused", {}, 0),
        ("forge_trainer_version", {}, STEPS),
        ("forge_arm_active", {"arm": "offline"}, 1),
        ("forge_arm_active", {"arm": "on_policy"}, 0),
        ("forge_replicas", {"role": "generator", "state": "healthy"}, 1),
        ("forge_replicas", {"role": "generator", "state": "dead"}, 1),
        ("forge_replicas", {"role": "generator", "state": "suspect"}, 0),
        ("forge_replicas", {"role": "generator", "state": "draining"}, 0),
        ("forge_pool_target_replicas", {"role": "generator"}, 2),
        ("forge_requests_waiting", {"role": "generator"}, 3),
        ("forge_requests_total", {"role": "generator", "outcome": "ok"}, 40),
        ("forge_requests_total", {"role": "generator", "outcome": "error"}, 2),
        ("forge_request_retries_total", {"role": "generator"}, 5),
        ("forge_replica_restarts_total", {"role": "generator"}, 1),
        ("forge_replica_ongoing_requests", {"replica": "generator[0]"}, 1),
        ("forge_replica_resident_memory_bytes", {"replica": "trainer[0]"}, MEMORY),
        ("forge_replica_version", {"replica": "generator[1]"}, STEPS - 2),
        ("forge_replica_staleness_versions", {"replica": "generator[1]"}, 2),
        ("forge_replica_staleness_versions", {"replica": "generator[0]"}, 0),
    ],
)  # fmt: skip
def test_the_run_as_it_was_told(
    told: PrometheusSink, name: str, labels: Labels, expected: float
) -> None:
    assert value(told, name, **labels) == pytest.approx(expected)
