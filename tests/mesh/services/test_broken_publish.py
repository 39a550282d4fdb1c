"""A publish that does not reach a generator stops the run; it never trains on stale tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from monarch.actor import endpoint
from small_run import MESH, SMALL

from actors.model_actors import GeneratorActor
from protocols.errors import PublishError, StaleTokenError
from protocols.records.status import RunStatus
from protocols.spec.loading import load_spec
from protocols.spec.mesh import RunSpec
from protocols.types import CartridgeSnapshot, GenerateOutput, GenerateRequest, PrefixRef
from services import roles
from services.control.commands import RunCommands
from services.mesh import open_mesh, spawn_roles
from services.run_directory import RunDirectory
from services.telemetry.hub import open_sinks
from services.telemetry.recorder import RunLog
from training.recipes.registry import open_course
from training.training_run import TrainingRun


class Deaf(GeneratorActor):
    """Acknowledges every publish after the first without taking it: the seed system's defect."""

    @endpoint
    async def load(self, snapshot: CartridgeSnapshot) -> int:
        if snapshot.version == 0:
            tensors = await self._plane.get(snapshot.packet)
            self._cartridges.add(0, snapshot.names, tensors["kv"])
        return snapshot.version


class Lying(Deaf):
    """Deaf, and answers requests for newer versions with the old one, saying which it used."""

    @endpoint
    async def generate(self, requests: Sequence[GenerateRequest]) -> GenerateOutput:
        from learning.decoding.decode_batch import generate

        old = [
            r
            if r.prefix.name.startswith("document/")
            else GenerateRequest(
                r.id, r.prompt_ids, PrefixRef(r.prefix.name, 0), r.sampling, r.seed
            )
            for r in requests
        ]
        done = generate(self._model, old, self._lookup, self._end_ids)
        return GenerateOutput(0.0, tuple(done))


def small_spec() -> RunSpec:
    sets = {**SMALL, "evaluate.arms": "[on_policy]", "evaluate.probe_every": 0}
    sets |= {"roles.generator.replicas": 1, "plane": "shared_memory"}
    return load_spec(str(MESH), sets=[f"{k}={v}" for k, v in sets.items()]).spec


async def run_with(spec: RunSpec, directory: RunDirectory) -> TrainingRun:
    """A run driven from this process, without a controller."""
    hub = open_sinks(spec, directory, lambda sink, message: None)
    recorder = RunLog(directory, hub)
    mesh = await open_mesh(spec, recorder.event, recorder.span)
    helm = RunCommands(
        RunStatus, lambda **_: None, lambda: mesh.pools, recorder, mesh.service.scale
    )
    try:
        course = open_course(spec, mesh)
        await spawn_roles(spec, course.documents, course.end_ids, mesh, directory)
        run = TrainingRun(
            spec, course, mesh, directory, recorder, lambda **_: None, helm.between_steps
        )
        await run.go()
        return run
    finally:
        await mesh.stop()
        await asyncio.to_thread(recorder.close)


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        (Deaf, PublishError, r"version 1 is not held here \(held: \[0\]\)"),
        (Lying, StaleTokenError, r"was sampled by version 0, and version 1 is being trained"),
    ],
)
def test_a_broken_publish_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    broken: type[Any],
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.setitem(roles.ROLES, "generator", broken)
    spec = small_spec()
    directory = RunDirectory.create(tmp_path, spec.mesh.name, "spec")
    with pytest.raises(error, match=message):
        asyncio.run(run_with(spec, directory))
    # Step 1 trained on version 0's own tokens; nothing was trained after the publish that broke.
    lines = directory.metrics.read_text().splitlines()
    assert len(lines) == 1
