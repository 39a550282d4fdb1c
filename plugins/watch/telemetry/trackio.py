"""Log to trackio: one run of the project `cartridge-forge` for each run, in a local database.

Nothing is sent anywhere. TRACKIO_DIR is the folder of the database, TRACKIO_PROJECT another
project; `trackio show` opens the pages. With TRACKIO_SERVER_URL, a server of yours gets the rows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from contextvars import copy_context
from os import environ
from typing import Any

import trackio

from cartridge_forge.plugins.watch.telemetry.hub import ArmSink
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.run_directory import RunDirectory

PROJECT = "cartridge-forge"


class TrackioSink(ArmSink):
    """Log under `<arm>/...`, with the arm's step beside its values. A resumed run continues its
    run of trackio.

    `spec` becomes the run's config. Raises SpecError when trackio will not start a run.
    """

    def __init__(self, run: str, mesh: str, spec: Mapping[str, Any]) -> None:
        project = environ.get("TRACKIO_PROJECT", PROJECT)
        try:
            with redirect_stdout(sys.stderr):  # it prints where it logs
                # In a context of its own: trackio ends the context's run once more at exit.
                self._run = copy_context().run(
                    trackio.init, project=project, name=run, group=mesh, config=dict(spec),
                    resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False,
                )  # fmt: skip
        except Exception as error:  # of the library, and of the server that it is told
            raise SpecError(
                f"telemetry.sinks: trackio did not start a run: {error}; see TRACKIO_DIR and "
                "TRACKIO_SERVER_URL, or leave trackio out"
            ) from error

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()

    def log(self, arm: str, values: Mapping[str, float]) -> None:
        self._run.log({f"{arm}/{name}": value for name, value in values.items()})


def open_sink(spec: RunSpec, directory: RunDirectory) -> TrackioSink:
    """Open a run of trackio. Raises SpecError."""
    return TrackioSink(directory.id, spec.mesh.name, spec.as_dict())
