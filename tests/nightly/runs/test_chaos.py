"""Twenty deaths in a short run, and it ends as the undisturbed one does, to the byte."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from chaos import (
    HASTY,
    REPLACED,
    STAGES,
    Blow,
    Storm,
    draw,
    points,
    shared_memory,
    storm,
    wait_until_freed,
)
from small_run import SMALL, command, latest, rows, run_to_end, same_outcome

LONGER: dict[str, Any] = {"train.steps": 24, "evaluate.probe_every": 10, **HASTY}
ON_POLICY, OFFLINE = STAGES.index("on_policy"), STAGES.index("offline")


def undisturbed(root: Path, **sets: Any) -> Path:
    process = run_to_end(command(root, **sets))
    assert process.returncode == 0, process.stdout + process.stderr
    return latest(root)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), **LONGER)


def ended_right(done: Storm, reference: Path) -> None:
    """As the undisturbed run: no rollout lost, none doubled."""
    assert done.code == 0, done.story()
    path = latest(done.root)
    same_outcome(path, reference)
    rollouts = rows(path / "rollouts.jsonl")
    assert len({(r["arm"], r["id"]) for r in rollouts}) == len(rollouts)
    steps = {(r["arm"], r["step"]) for r in rows(path / "metrics.jsonl")}
    each = Counter((r["arm"], r["step"]) for r in rollouts)
    assert each == dict.fromkeys(steps, SMALL["rollout.prompts"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [2])
def test_twenty_random_blows_change_nothing(seed: int, reference: Path, tmp_path: Path) -> None:
    before = shared_memory()
    blows = draw(random.Random(seed), points(reference), 20, controllers=2)
    done = storm(tmp_path, blows, timeout=500, **LONGER)
    assert len(done.struck) == 20
    assert {b.role for b in done.struck} == {*REPLACED, "controller"}
    ended_right(done, reference)
    wait_until_freed(before)


WORST = (
    # In the middle of a step; then its scores are lost with the store, before it and in it.
    Blow((ON_POLICY, 1), "trainer", phase="train"),
    Blow((ON_POLICY, 2), "store", phase="score"),
    Blow((ON_POLICY, 4), "store", phase="train"),
    # A cartridge on its way: who makes it, who takes it, what carries it.
    Blow((ON_POLICY, 6), "generator", phase="publish"),
    Blow((ON_POLICY, 7), "trainer", phase="publish"),
    Blow((ON_POLICY, 8), "store", phase="publish"),
    Blow((ON_POLICY, 9), "generator", kind="pause", pause_s=1.5, phase="publish"),
    # A checkpoint half written.
    Blow((ON_POLICY, 10), "trainer", phase="checkpoint"),
    # All that know the cartridge, at once.
    Blow((ON_POLICY, 12), "store", phase="score"),
    Blow((ON_POLICY, 12), "trainer"),
    Blow((ON_POLICY, 12), "generator", replica=0),
    Blow((ON_POLICY, 12), "generator", replica=1),
    # The second store, while it is filled.
    Blow((ON_POLICY, 14), "store"),
    Blow((ON_POLICY, 14), "store", delay_s=0.15),
)


@pytest.mark.timeout(600)
def test_deaths_at_the_worst_moments_change_nothing(tmp_path: Path) -> None:
    """With rollouts that run ahead, whose older cartridge must come back too. (The random blows
    strike a run without.)"""
    sets = {
        **LONGER, "train.checkpoint_every": 1, "train.staleness": 1, "evaluate.arms": ["on_policy"],
    }  # fmt: skip
    reference = undisturbed(tmp_path / "undisturbed", **sets)
    done = storm(tmp_path / "struck", WORST, timeout=500, **sets)
    ended_right(done, reference)


def test_without_restarts_a_death_ends_the_run_and_it_can_be_resumed(
    reference: Path, tmp_path: Path
) -> None:
    sets = {**LONGER, "roles.generator.restarts": 0}
    done = storm(tmp_path, [Blow((ON_POLICY, 5), "generator", phase="rollout")], **sets)
    assert done.code == 1, done.story()
    assert "error: generator[0] died, and roles.generator.restarts (0) are used up" in done.said
    path = latest(tmp_path)
    assert '"status": "failed"' in (path / "results.json").read_text()
    assert list((path / "checkpoints").glob("version-*"))
    resumed = run_to_end(command(tmp_path, "--resume", **sets))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert latest(tmp_path) == path
    same_outcome(path, reference)
