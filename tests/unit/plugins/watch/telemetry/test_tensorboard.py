"""TensorBoard files, read back by TensorBoard's own reader."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from telemetry_stream import STEPS, row, tell
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cartridge_forge.plugins.watch.telemetry.tensorboard import TensorBoardSink


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
