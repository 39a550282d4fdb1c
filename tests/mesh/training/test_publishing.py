"""Test what a publish writes, and engines that die in training."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from loop_setup import between_steps, run_with, small_spec
from rooms.services.dying_engines import (
    DeadlyRolloutGenerator,
    DyingDocTeacher,
    DyingRolloutGenerator,
)
from small_run import rows

from cartridge_forge.protocols.errors import EngineKilledError
from cartridge_forge.protocols.files import read_rows
from cartridge_forge.protocols.plugins import CORE
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling
from cartridge_forge.services.run_directory import RunDirectory
from cartridge_forge.training.training_run import TrainingRun

STEPS = 3


def trained(path: Path, run_id: str) -> tuple[Path, list[str]]:
    """The directory of a run of a few steps, and the roles that lost a replica to its engine."""
    spec = small_spec(train__steps=STEPS, roles__generator__restarts=0)
    directory = RunDirectory.create(path, spec.mesh.name, run_id)
    asyncio.run(run_with(spec, directory))
    events = rows(directory.events)
    return directory.path, [
        e["role"] for e in events if e["event"] == "replica_lost" and e["cause"] == "engine"
    ]


def test_a_run_goes_on_as_if_no_engine_had_died(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole, none = trained(tmp_path / "whole", "a")
    assert none == []
    monkeypatch.setitem(
        CORE.roles,
        "generator",
        f"{DyingRolloutGenerator.__module__}:{DyingRolloutGenerator.__name__}",
    )
    monkeypatch.setitem(
        CORE.roles, "doc_teacher", f"{DyingDocTeacher.__module__}:{DyingDocTeacher.__name__}"
    )
    dying, lost = trained(tmp_path / "dying", "a")
    assert sorted(lost) == ["doc_teacher", "generator"]
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert (dying / name).read_bytes() == (whole / name).read_bytes(), name
    assert len(rows(whole / "metrics.jsonl")) == STEPS


def test_a_rollout_that_kills_every_generator_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(
        CORE.roles,
        "generator",
        f"{DeadlyRolloutGenerator.__module__}:{DeadlyRolloutGenerator.__name__}",
    )
    with pytest.raises(EngineKilledError, match=r"2 engines in turn died.*no memory for this pass"):
        trained(tmp_path, "a")


CARTRIDGE = 28 * 512 * 4  # 28 tokens, 4 layers x 2 x 2 heads x 32 numbers of float32


async def served(run: TrainingRun) -> dict[str, dict[str, str]]:
    """Of each generator: the fingerprints that it answers with, by cartridge."""
    (_, snapshot) = run._weights._published[-1]
    asked = [
        GenerateRequest(
            name, (5, 6), PrefixRef(f"cartridge/{name}", snapshot.version),
            Sampling(temperature=0.0, max_tokens=1), 0,
        )
        for name in snapshot.names
    ]  # fmt: skip
    replies = await run._generator.ask_each(asked)
    return {replica: {c.request_id: c.served[0] for c in done} for replica, done in replies.items()}


@pytest.mark.timeout(600)
def test_a_step_moves_two_of_twenty_and_every_reader_has_all(tmp_path: Path) -> None:
    """Before step 3 a generator dies and another is started beside it: each answers over the
    numbers that were published, most of them with version 0. The trainer dies too, and its
    successor publishes no more than before."""
    spec = small_spec(
        data__patients=20, rollout__prompts=2, train__steps=4, evaluate__questions=4,
        train__checkpoint_every=0,
    )  # fmt: skip
    directory = RunDirectory.create(tmp_path, spec.mesh.name, "spec")
    seen: dict[str, Any] = {}

    async def work(run: TrainingRun) -> None:
        step = run._state.step
        snapshot = run._weights._published[-1][1]
        seen[f"since {step}"] = sorted(c.since for c in snapshot.cartridges)
        seen[f"packets {step}"] = len(snapshot.packets)
        if step != 2:
            return
        generators, trainers = run._generator.pool, run._trainer.pool
        generators.scale(2)
        for pool in (generators, trainers):
            os.kill(await pool.route("ready"), signal.SIGKILL)
            while pool.restarts < 1:
                await pool._changed.wait()
            await pool.settled(300.0)
        seen["served"] = await served(run)
        seen["published"] = {c.name: c.fingerprint for c in snapshot.cartridges}

    asyncio.run(between_steps(spec, directory, work))
    assert seen["since 0"] == [0] * 20
    assert seen["since 1"] == [0] * 18 + [1] * 2
    assert len(seen["since 2"]) == 20
    assert seen["since 2"][-2:] == [2, 2]
    assert (seen["packets 0"], seen["packets 1"]) == (1, 2)
    assert len(seen["published"]) == 20
    assert sorted(seen["served"]) == ["generator[0]", "generator[1]"]
    for fingerprints in seen["served"].values():
        assert fingerprints == seen["published"]
    moved = [
        row["bytes"]["cartridges"] for row in read_rows(directory.events) if row["event"] == "step"
    ]
    # Put once, and got by one generator; by two from step 3 on.
    assert moved == [2 * CARTRIDGE * 2] * 2 + [2 * CARTRIDGE * 3] * 2
