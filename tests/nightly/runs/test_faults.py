"""Test how runs end or go on after faults: wrong contents, signals, kills."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import wrong_generators as wrong
from chaos import (
    HASTY,
    REPLACED,
    STAGES,
    Blow,
    Eye,
    Storm,
    draw,
    points,
    shared_memory,
    storm,
    wait_until_freed,
)
from loop_setup import run_with, small_spec
from small_run import SMALL, command, latest, rows, run_to_end, running, same_outcome

from cartridge_forge.protocols.errors import StaleTokenError
from cartridge_forge.protocols.files import read_rows
from cartridge_forge.protocols.plugins import CORE
from cartridge_forge.services.run_directory import RunDirectory

HONEST = [
    (wrong.FilesFirst, r"which is cartridge (\S+) version 0"),
    (wrong.IgnoresUpdates, r"which is cartridge (\S+) version 0"),
    (wrong.MixesLayers, "which no published cartridge has"),
    (wrong.MixesRequests, r"which is cartridge (\S+) version 0"),
    (wrong.OtherCartridge, r"which is cartridge (\S+) version 1"),
]
ECHOES = [
    wrong.EchoFilesFirst,
    wrong.EchoIgnoresUpdates,
    wrong.EchoMixesLayers,
    wrong.EchoMixesRequests,
    wrong.EchoOtherCartridge,
]


def refusal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, generator: type, **sets: object
) -> str:
    """The error of a run with this generator, which trained step 1 alone and left no step half
    done."""
    monkeypatch.setitem(CORE.roles, "generator", f"wrong_generators:{generator.__name__}")
    spec = small_spec(**sets)
    directory = RunDirectory.create(tmp_path, spec.mesh.name, "spec")
    with pytest.raises(StaleTokenError) as caught:
        asyncio.run(run_with(spec, directory))
    (row,) = read_rows(directory.metrics)
    assert row["step"] == 1
    assert row["sampler_gap"]["max"] < 1e-3
    assert not (directory.path / "results.json").exists()
    return str(caught.value)


@pytest.mark.parametrize(("generator", "whose"), HONEST)
def test_by_its_fingerprint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, generator: type, whose: str
) -> None:
    told = refusal(monkeypatch, tmp_path, generator)
    named = re.search(
        r"^generator\[0\] served on_policy/2/\S+ under cartridge (\S+) version 1, published with "
        r"fingerprint ([0-9a-f]{12}), from numbers with fingerprint ([0-9a-f]{12}), ", told
    )  # fmt: skip
    assert named, told
    assert named[2] != named[3]
    found = re.search(whose, told)
    assert found, told
    if found.groups():
        assert (found[1] == named[1]) == (generator is not wrong.OtherCartridge)


@pytest.mark.parametrize("generator", ECHOES)
def test_by_its_log_probabilities(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, generator: type
) -> None:
    told = refusal(monkeypatch, tmp_path, generator)
    assert "nats from the trainer's under version 1 on average" in told
    assert re.search(r"most in sample on_policy/2/\d+", told), told
    assert told.endswith("(sampled by generator[0])")


@pytest.mark.parametrize("generator", [wrong.SilentIgnoresUpdates, wrong.SilentOtherCartridge])
def test_by_the_canary_of_the_publish(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, generator: type
) -> None:
    """A backend without evidence of its own is asked at each publish. It is refused in the publish
    whose greedy text differs first, which for a version left out may be a later one."""
    monkeypatch.setitem(CORE.roles, "generator", f"wrong_generators:{generator.__name__}")
    spec = small_spec()
    directory = RunDirectory.create(tmp_path, spec.mesh.name, "spec")
    with pytest.raises(StaleTokenError) as caught:
        asyncio.run(run_with(spec, directory))
    told = str(caught.value)
    named = re.match(
        r"generator\[0\] continued the start of patient_\d+ over cartridge version (\d+) by a "
        r"token that the trainer finds \S+ nats less likely", told
    )  # fmt: skip
    assert named, told
    trained = read_rows(directory.metrics) if directory.metrics.exists() else []
    assert int(named[1]) == len(trained) + 1
    assert not (directory.path / "results.json").exists()


def test_a_right_backend_without_evidence_ends_its_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(CORE.roles, "generator", "wrong_generators:Silent")
    spec = small_spec(train__steps=3)
    directory = RunDirectory.create(tmp_path, spec.mesh.name, "spec")
    asyncio.run(run_with(spec, directory))
    rows = read_rows(directory.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert not any("sampler_gap" in row for row in rows), "nothing was there to compare"


GONE_SECONDS = 120.0
ONE_GENERATOR = {
    "roles.generator.replicas": 1,
    "train.steps": 1000,
    "evaluate.arms": ["on_policy"],
    "spares": 1,
}


@pytest.mark.parametrize(
    ("end", "plane"),
    [
        # With a replica that answers nobody, which must not keep the others. Without one
        # test_interrupted ends runs in each way.
        (signal.SIGINT, "torchstore"),
        (signal.SIGKILL, "torchstore"),
        (signal.SIGTERM, "shared_memory"),
        (signal.SIGKILL, "shared_memory"),
    ],
)
def test_nothing_outlives_the_client(end: signal.Signals, plane: str, tmp_path: Path) -> None:
    before = shared_memory()
    with running(command(tmp_path, plane=plane, **ONE_GENERATOR), tmp_path) as run:
        run.wait_for("on_policy", 2)
        eye = Eye(run, time.monotonic() + GONE_SECONDS)
        # Client, controller, three roles, a store or a janitor, and a warm spare.
        eye.wait(lambda: len(run.alive()) >= 7)
        os.kill(eye.replicas("doc_teacher")[0].pid, signal.SIGSTOP)
        time.sleep(0.5)
        if end is signal.SIGINT:
            os.killpg(run.process.pid, end)  # as a terminal does: the whole group
        else:
            run.process.send_signal(end)
        run.wait_until_gone(GONE_SECONDS)
        eye.close()
        assert run.process.wait(timeout=GONE_SECONDS) in (130, 143, -signal.SIGKILL)
    wait_until_freed(before)


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
