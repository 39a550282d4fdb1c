"""Runs whose generators and teachers fail in a forward pass: repeated as after a kill, or ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from loop_setup import run_with, small_spec
from rooms.services.dying_engines import (
    DeadlyRolloutGenerator,
    DyingDocTeacher,
    DyingRolloutGenerator,
)
from small_run import rows

from cartridge_forge.protocols.errors import EngineKilledError
from cartridge_forge.protocols.plugins import CORE
from cartridge_forge.services.run_directory import RunDirectory

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
