"""Serve a run's control plane, feed its sinks and judge its progress: `services.run_log`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from cartridge_forge.plugins.watch.control.commands import RunCommands
from cartridge_forge.plugins.watch.control.endpoints import (
    Endpoints,
    new_token,
    remove_endpoints,
    write_endpoints,
)
from cartridge_forge.plugins.watch.control.server import ControlPlane
from cartridge_forge.plugins.watch.telemetry.hub import open_sinks
from cartridge_forge.plugins.watch.telemetry.watchdog import watch
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.run_directory import RunDirectory
from cartridge_forge.services.run_log import ObservedRun


class ControlledRun:
    """Implement `RunObserver` by gRPC, the sinks of `telemetry` and the watchdog."""

    def __init__(
        self, spec: RunSpec, directory: RunDirectory, report: Callable[[str, str], None]
    ) -> None:
        """Open the sinks. Raises SpecError for one that cannot open."""
        self._mesh, self._directory = spec.mesh, directory
        self.sink = open_sinks(spec, directory, report)
        self._commands: RunCommands | None = None
        self._plane: ControlPlane | None = None
        self._watching: asyncio.Task[None] | None = None
        self._run: ObservedRun | None = None

    async def start(self, run: ObservedRun) -> None:
        mesh, path = self._mesh, self._directory.path
        self._run = run
        self._commands = RunCommands(
            run.status, run.show, lambda: run.pools, run.log, run.scale, mesh.control.max_replicas
        )
        token = new_token() if mesh.control.token_env is None else None
        self._plane = ControlPlane(self._commands, mesh.control, self._directory.id, token)
        watching = watch(
            run.status, run.show, run.log, run.pools, mesh.watchdog, path, mesh.spawn_timeout_s / 2
        )
        self._watching = asyncio.create_task(watching)
        await self._plane.start()
        endpoints = Endpoints(self._plane.address, self.sink.metrics_url, os.getpid())
        write_endpoints(path, endpoints, token)

    async def stop_run(self) -> None:
        if self._commands is not None:
            await self._commands.stop()

    async def between_steps(self, checkpoint: Callable[[], Awaitable[str]]) -> None:
        assert self._commands is not None, "the run has started"
        await self._commands.between_steps(checkpoint)

    def end_commands(self) -> None:
        if self._commands is not None:
            self._commands.over()

    def end_watch(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def closings(self) -> Sequence[tuple[str, Callable[[], Any]]]:
        steps: list[tuple[str, Callable[[], Any]]] = [
            ("endpoints", partial(remove_endpoints, self._directory.path))
        ]
        if self._run is not None:
            steps.append(("followers", self._run.log.end_streams))
        if self._plane is not None:
            steps.append(("control plane", self._plane.stop))
        return steps
