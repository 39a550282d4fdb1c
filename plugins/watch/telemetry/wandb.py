"""Log to Weights & Biases: one W&B run for each run, with its files under the run directory.

Mode, key, host and project come from the environment (WANDB_MODE, WANDB_API_KEY, WANDB_BASE_URL,
WANDB_PROJECT, WANDB_ENTITY). `WANDB_MODE=offline` sends nothing; `wandb sync` does later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb
from wandb.errors import Error as WandbError

from cartridge_forge.plugins.watch.telemetry.hub import ArmSink
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.run_directory import RunDirectory

PROJECT = "cartridge-forge"
START_SECONDS = 120.0  # of its own process, and for its server
FINISH_SECONDS = 4.0


class WandbSink(ArmSink):
    """Log under `<arm>/...`, each arm over its own step. A resumed run continues its W&B run.

    `spec` becomes the W&B config. Raises SpecError when W&B will not start a run.
    """

    def __init__(self, folder: Path, run: str, mesh: str, spec: Mapping[str, Any]) -> None:
        settings = wandb.Settings(
            console="off",  # do not capture the run's output
            quiet=True,
            silent=True,
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,  # Prometheus has the machine's numbers
            init_timeout=START_SECONDS,
            x_service_wait=START_SECONDS,
            login_timeout=1,  # never wait for a key on the terminal
            finish_timeout=FINISH_SECONDS,
        )
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        try:
            self._run = wandb.init(
                dir=folder, id=run, name=run, group=mesh, project=project, config=dict(spec),
                resume="allow", reinit="create_new", settings=settings,
            )  # fmt: skip
        except WandbError as error:
            raise SpecError(
                f"telemetry.sinks: W&B did not start a run: {error}; set WANDB_API_KEY, or "
                "WANDB_MODE=offline, or leave wandb out"
            ) from error
        self._arms: set[str] = set()

    def close(self) -> None:
        self._run.finish()
        wandb.teardown()  # its service process

    def log(self, arm: str, values: Mapping[str, float]) -> None:
        if arm not in self._arms:
            self._arms.add(arm)
            self._run.define_metric(f"{arm}/*", step_metric=f"{arm}/step")
        self._run.log({f"{arm}/{name}": value for name, value in values.items()})


def open_sink(spec: RunSpec, directory: RunDirectory) -> WandbSink:
    """Open a run of Weights & Biases. Raises what the library raises."""
    return WandbSink(directory.path, directory.id, spec.mesh.name, spec.as_dict())
