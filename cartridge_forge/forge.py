"""Train, evaluate and steer a run from Python; all of it is what `forge-run` and `forge` do."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cartridge_forge.cartridge import Cartridge
from cartridge_forge.display import page
from cartridge_forge.evaluation import ComparedArms
from cartridge_forge.events import RunEvent, RunFollower
from cartridge_forge.processes import finished_output
from cartridge_forge.protocols.errors import RunError, SpecError
from cartridge_forge.training_process import LOOK_SECONDS, TrainingProcess

if TYPE_CHECKING:
    from cartridge_forge.plugins.watch.commands.control_client import ControlClient
    from cartridge_forge.protocols.records.status import RunStatus

Paths = str | Path | Sequence[str | Path]


class Forge:
    """Describe one training run, and drive it: `Forge("longhealth")`, `Forge("my/mesh.yaml",
    sets={"train.steps": 50})` or `Forge(model="models/mine", documents="notes")`.

    `mesh` is a mesh file or the name of a shipped one. `model` and `documents` are for the mesh
    `documents`, which is taken where no other is named; relative paths start in the current
    directory. `sets` are keys of the mesh and its config. Runs are kept under `run_dir`. Raises
    SpecError for a mistake in any of them.
    """

    def __init__(
        self,
        mesh: str | Path | None = None,
        *,
        model: str | Path | None = None,
        documents: Paths | None = None,
        sets: Mapping[str, Any] | None = None,
        run_dir: str | Path = "runs",
    ) -> None:
        from cartridge_forge.plugins.spec_files.loading import load_spec

        if mesh is None and documents is None:
            raise SpecError("Forge takes a mesh or documents; name one, as in Forge('longhealth')")
        settings = dict(sets or {})
        if documents is not None:
            settings["data.path"] = _texts(documents)
        if model is not None:
            settings["model.path"] = str(model)
        self.mesh = str(mesh or "documents")
        self.run_dir = Path(run_dir)
        self._sets: list[str] | None = [
            f"{key}={json.dumps(value)}" for key, value in settings.items()
        ]
        self._name = load_spec(self.mesh, sets=self._sets).spec.mesh.name
        self._run: Path | None = None
        self._training: TrainingProcess | None = None

    @classmethod
    def attach(cls, run: str | Path, *, run_dir: str | Path = "runs") -> Forge:
        """Return a Forge of a run that was started elsewhere, running or ended: its directory or
        id. Raises ControlError for an unknown one."""
        from cartridge_forge.plugins.spec_files.loading import load_resolved
        from cartridge_forge.plugins.watch.control.endpoints import find_run

        forge = cls.__new__(cls)  # without a mesh: nothing is trained
        forge._run = find_run(Path(run_dir), str(run))
        forge._name = load_resolved(forge._run / "spec.yaml").mesh.name
        forge.mesh, forge.run_dir, forge._sets = forge._name, Path(run_dir), None
        forge._training = None
        return forge

    @property
    def run(self) -> Path:
        """Return the run's directory. Raises RunError before the run began."""
        if self._training is not None and self._training.run is not None:
            self._run = self._training.run
        if self._run is None:
            raise RunError("there is no run yet: iterate over train(), or attach to a run")
        return self._run

    def train(self, *, baselines: bool = True, resume: str | None = None) -> TrainingProcess:
        """Return the run as an iterator of typed events, for `for` and `async for`; it starts with
        the first one. Without `baselines` only the on-policy arm is trained and measured. `resume`
        is the id of a run of this mesh to go on with."""
        if self._sets is None:
            raise RunError("this Forge is attached to a run; make one of its mesh to train")
        words = ["run", self.mesh, *(word for text in self._sets for word in ("--set", text))]
        words += ["--run-dir", str(self.run_dir.absolute())]
        words += [] if baselines else ["--no-baselines"]
        words += [] if resume is None else ["--resume", resume]
        self._training = TrainingProcess(words, self.run_dir.absolute() / self._name)
        return self._training

    def events(self) -> Iterator[RunEvent]:
        """Yield the run's events from its first to its last; of a run in progress each further one
        as it happens."""
        from cartridge_forge.plugins.watch.control.endpoints import is_running

        follower = RunFollower(self.run)
        while is_running(self.run):
            yield from follower.new()
            time.sleep(LOOK_SECONDS)
        yield from follower.new()

    def evaluate(
        self, *, questions: int | None = None, arms: Sequence[str] | None = None
    ) -> ComparedArms:
        """Return how the run's cartridges compare with no, a cut and the whole document, by
        `forge eval`. Raises ForgeError."""
        words = ["eval", str(self.run)]
        words += [] if questions is None else ["--questions", str(questions)]
        words += [] if arms is None else ["--arms", ",".join(arms)]
        finished_output(words)
        content = json.loads((self.run / "eval.json").read_bytes())
        return ComparedArms(tuple(content["rows"]), tuple(content["pairs"]), self.run)

    @property
    def cartridges(self) -> dict[str, Cartridge]:
        """Return the cartridges of the run's last checkpoint by name. Raises DataError for a run
        without one."""
        from cartridge_forge.plugins.library.formats.run_checkpoint import read_all

        return {name: Cartridge(name, self.run) for name in read_all(self.run)}

    @property
    def results(self) -> dict[str, Any] | None:
        """Return results.json; None while there is none."""
        from cartridge_forge.services.run_directory import RunDirectory

        return RunDirectory(self.run).read_results()

    def status(self) -> RunStatus:
        """Return how the run stands now, of one that has ended without its pools."""
        from cartridge_forge.plugins.watch.commands.runs import summary_of
        from cartridge_forge.plugins.watch.control.endpoints import is_running
        from cartridge_forge.protocols.records.status import RunStatus

        if is_running(self.run):
            with self._control() as client:
                return client.status()[1]
        ended = summary_of(self.run)
        status = RunStatus(stage=ended.state, kl=ended.kl, accuracy=ended.accuracy, done=True)
        return replace(status, step=ended.step or 0)

    def pause(self) -> None:
        """Hold the run after the step in progress. Raises ControlError, as the next four do."""
        with self._control() as client:
            client.pause()

    def resume(self) -> None:
        """Let a paused run go on."""
        with self._control() as client:
            client.resume()

    def stop(self) -> None:
        """End the run after the step in progress, with a checkpoint."""
        with self._control() as client:
            client.stop()

    def checkpoint(self) -> str:
        """Write a checkpoint after the step in progress, and return its name."""
        with self._control() as client:
            return client.checkpoint()

    def scale(self, role: str, replicas: int) -> None:
        """Set how many replicas a role has."""
        with self._control() as client:
            client.scale(role, replicas)

    def _control(self) -> ControlClient:
        from cartridge_forge.plugins.watch.commands.control import control_target
        from cartridge_forge.plugins.watch.commands.control_client import ControlClient

        return ControlClient(control_target(str(self.run), self.run_dir, None, None, None))

    def _repr_html_(self) -> str:
        if self._run is None and (self._training is None or self._training.run is None):
            return page(f"Forge {self._name}", ("", ""), [("run", "not started")])
        from cartridge_forge.plugins.watch.commands.runs import summary_of
        from cartridge_forge.plugins.watch.console import arm_rows

        ended = summary_of(self.run)
        rows = [("run", ended.id), ("state", ended.state), ("step", str(ended.step or "-"))]
        arms = arm_rows((self.results or {}).get("arms", {}))
        heads = ("arm", "accuracy", "95% CI", "n")
        page_html = page(f"Forge {self._name}", ("", ""), rows)
        return page_html + (page("arms", heads, [row[:4] for row in arms]) if self.results else "")


def _texts(paths: Paths) -> str | list[str]:
    return str(paths) if isinstance(paths, str | Path) else [str(path) for path in paths]
