"""A small run that is driven from the test's own process, without a controller."""

from __future__ import annotations

import asyncio

from small_run import MESH, SMALL

from protocols.records.status import RunStatus
from protocols.spec.loading import load_spec
from protocols.spec.mesh import RunSpec
from services.control.commands import RunCommands
from services.mesh import open_mesh, spawn_roles
from services.run_directory import RunDirectory
from services.telemetry.hub import open_sinks
from services.telemetry.recorder import RunLog
from training.recipes.registry import open_course
from training.training_run import TrainingRun


def small_spec(**more: object) -> RunSpec:
    sets = {**SMALL, "evaluate.arms": "[on_policy]", "evaluate.probe_every": 0}
    sets |= {"roles.generator.replicas": 1, "plane": "shared_memory"}
    sets |= {key.replace("__", "."): value for key, value in more.items()}
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
