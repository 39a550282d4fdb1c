"""/metrics: the values, over HTTP, as the client library's own parser reads them."""

from __future__ import annotations

import pytest
from rooms.services.prometheus_setup import Labels, value
from telemetry_stream import MEMORY, STEPS

from services.telemetry.prometheus import PrometheusSink


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("forge_run_info", {"run": "run-1", "mesh": "small"}, 1),
        ("forge_staleness_limit_versions", {}, 0),
        ("forge_step_phase_duration_seconds_sum", {"arm": "offline", "phase": "train"}, 4 * 0.3),
        ("forge_step_phase_duration_seconds_count", {"arm": "offline", "phase": "train"}, 4),
        ("forge_step_duration_seconds_sum", {"arm": "on_policy"}, 4 * 0.62),
        ("forge_step_duration_seconds_bucket", {"arm": "on_policy", "le": "0.5"}, 0),
        ("forge_step_duration_seconds_bucket", {"arm": "on_policy", "le": "1.0"}, 4),
        ("forge_training_loss", {"arm": "on_policy", "channel": "doc_kl"}, 0.5),
        ("forge_training_loss", {"arm": "on_policy", "channel": "grpo"}, -1.0),
        ("forge_training_loss", {"channel": "replay_dpo"}, 0.5),  # of the last with data
        ("forge_channel_denominator", {"channel": "replay_dpo"}, 0),
        ("forge_channel_denominator", {"channel": "doc_kl"}, 104),
        ("forge_channel_gradient_norm", {"channel": "grpo"}, 0.375),  # of the first step
        ("forge_channel_clipped_ratio", {"channel": "grpo"}, 0.125),
        ("forge_channel_gradient_removed_ratio", {"channel": "sdpo"}, 0.25),
        ("forge_episode_reward", {"arm": "on_policy"}, 0.25),
        ("forge_episodes_total", {"arm": "on_policy", "outcome": "judged"}, 4 * 7),
        ("forge_episodes_total", {"arm": "on_policy", "outcome": "errored"}, 4),
        ("forge_episode_flags_total", {"arm": "on_policy", "flag": "copied"}, 4 * 2),
        ("forge_episode_flags_total", {"arm": "on_policy", "flag": "degenerate"}, 0),
        # Counts since the run began, as the last step told them.
        ("forge_teacher_calls_total", {"teacher": "opus", "outcome": "answered"}, 3 * STEPS),
        ("forge_teacher_calls_total", {"teacher": "opus", "outcome": "http_500"}, 1),
        ("forge_teacher_spent_dollars_total", {"teacher": "opus"}, 0.5 * STEPS),
        ("forge_replay_states_total", {"verdict": "pair"}, 2 * STEPS),
        ("forge_replay_states_total", {"verdict": "tie"}, STEPS),
        ("forge_preference_pairs_total", {"outcome": "trained"}, 2 * STEPS),
        ("forge_gradient_norm", {"arm": "on_policy"}, 4.5),
        ("forge_learning_rate", {"arm": "on_policy"}, 0.02),
        ("forge_training_step", {"arm": "offline"}, STEPS),
        ("forge_trained_tokens_total", {"arm": "on_policy"}, 101 + 102 + 103 + 104),
        ("forge_stale_tokens_total", {"arm": "on_policy"}, 0),
        ("forge_rollouts_total", {"arm": "on_policy"}, 24),
        ("forge_accuracy_ratio", {"arm": "on_policy", "questions": "probe"}, 0.75),
        ("forge_accuracy_ratio", {"arm": "offline", "decoding": "sampled"}, 0.5),
        ("forge_plane_bytes_total", {"tensors": "scores"}, 8 * 4096),
        ("forge_plane_bytes_total", {"tensors": "cartridges"}, 8 * 65536),
        ("forge_document_lookups_total", {"found": "device"}, 8 * 5),
        ("forge_document_lookups_total", {"found": "host"}, 8),
        ("forge_document_lookups_total", {"found": "nowhere"}, 8 * 2),
        ("forge_document_evictions_total", {}, 8 * 3),
        ("forge_document_hit_ratio", {}, 0.75),
        ("forge_hidden_seconds_total", {"arm": "on_policy"}, 4 * 0.0625),
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
