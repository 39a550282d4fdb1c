"""A run's files under any order of steps, checkpoints, kills, full disks, damage and resumes.

At the end they are those of the calm run, to the byte. The run is a model: its rows follow from arm
and step alone, and its checkpoints and last states hold one tensor. The files, their repair and the
choice of what to go on from are the real ones. FORGE_SEQUENCES is the number of orders
(`make test-all`: 200).
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cartridge_forge.learning.checkpoint import (
    Checkpoint,
    LastState,
    newest_whole,
    write_checkpoint,
)
from cartridge_forge.plugins.host.run_lease import hold_lease
from cartridge_forge.protocols import files
from cartridge_forge.protocols.records.run_files import MetricRow, RolloutRow
from cartridge_forge.services.run_directory import RunDirectory, resume_point, write_run_state

STEPS = {"on_policy": 6, "offline": 4}
EVERY = 2


class Run:
    """One process's view of the run: what it has done, and what it holds in memory."""

    def __init__(self, directory: RunDirectory, arm: str = "on_policy", step: int = 0) -> None:
        self.directory, self.arm, self.step = directory, arm, step
        directory.require_room()

    @property
    def done(self) -> bool:
        return self.arm == "offline" and self.step == STEPS["offline"]

    @property
    def version(self) -> int:
        return self.step + (STEPS["on_policy"] if self.arm == "offline" else 0)

    def advance(self) -> None:
        """One step: its rows, in the order of a run's, then perhaps a checkpoint."""
        self.directory.require_room()
        arm, step = self.arm, self.step
        if arm == "on_policy" and step == STEPS[arm]:
            arm, step = "offline", 0
        step += 1
        trained = Run.__new__(Run)  # what its trainer has: a step ahead of the rows
        trained.arm, trained.step = arm, step
        version = {"version": trained.version}
        state = {"cartridge-0000-000000": {"x": torch.full((4,), float(trained.version))}}
        LastState(self.directory.last_state).write(Checkpoint(version, state))
        self.directory.append_rollouts([rollout(arm, step, i) for i in range(2)])
        self.directory.append_metric(metric(arm, step))
        self.directory.append_event("step", arm=arm, step=step)
        self.arm, self.step = arm, step
        write_run_state(self.directory, {"arm": arm, "step": step}, self.version)
        if step % EVERY == 0:
            self.checkpoint()

    def checkpoint(self) -> None:
        position = {"arm": self.arm, "step": self.step}
        state = {"state": {"x": torch.full((64,), float(self.version))}}
        facts = {"arm": self.arm, "position": position}
        write_checkpoint(
            self.directory.checkpoints, f"version-{self.version:06d}", Checkpoint(facts, state), 2
        )


def resumed(directory: RunDirectory) -> Run:
    """As the controller resumes: heal, choose, cut."""
    whole, _ = directory.heal()
    path, _ = newest_whole(directory.checkpoints, lambda at: directory.stands(at, whole))
    arm, step = "on_policy", 0
    point = resume_point(directory, path, whole)
    if point.state is not None:
        arm, step = point.state["arm"], point.state["step"]
        [x] = LastState(directory.last_state).read().parts.values()  # type: ignore[union-attr]
        version = step + (STEPS["on_policy"] if arm == "offline" else 0)
        assert x["x"].tolist() == [version] * 4, "the trainer's state is of the same step"
    elif path is not None:
        version = int(path.name.removeprefix("version-"))
        ahead = version - STEPS["on_policy"]
        arm, step = ("offline", ahead) if ahead > 0 else ("on_policy", version)
    if point.state is None:
        shutil.rmtree(directory.last_state, ignore_errors=True)
        directory.run_state.unlink(missing_ok=True)
    directory.truncate_after(arm, step)
    return Run(directory, arm, step)


def rollout(arm: str, step: int, index: int) -> RolloutRow:
    return RolloutRow(
        arm=arm, step=step, id=f"{arm}/{step}/{index}", document="d", kind="k", prompt_ids=(1,),
        response_ids=(step, index), sampler_logprobs=(-0.5,), versions=(step,), sampling={},
        finish_reason="stop", text="é" * 9, cartridge="d", contexts=("d",),
    )  # fmt: skip


def metric(arm: str, step: int) -> MetricRow:
    return MetricRow(
        arm=arm, step=step, version=step, kl=1 / step, grad_norm=0.5, lr=0.1, tokens=step,
        stale_tokens=0,
    )  # fmt: skip


class RunModel(RuleBasedStateMachine):
    """`run` is None while no process works in the directory."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="run-model-"))
        calm = Run(RunDirectory.create(self.folder, "calm", "spec"))
        while not calm.done:
            calm.advance()
        self.calm = calm.directory
        self.directory = RunDirectory.create(self.folder, "struck", "spec")
        self.run: Run | None = Run(self.directory)
        self.append, self.made = files._append, 0

    @precondition(lambda self: self.run is not None and not self.run.done)
    @rule()
    def step(self) -> None:
        assert self.run is not None
        self.run.advance()

    @precondition(lambda self: self.run is not None)
    @rule()
    def checkpoint_by_hand_and_stop(self) -> None:
        assert self.run is not None
        self.run.checkpoint()
        self.run = None

    @precondition(lambda self: self.run is not None and not self.run.done)
    @rule(file=st.sampled_from(["metrics", "rollouts", "events"]), cut=st.integers(1, 40))
    def killed_in_a_write(self, file: str, cut: int) -> None:
        """The step's rows are written up to somewhere in this file's, and nothing after it."""
        path: Path = getattr(self.directory, file)

        def torn(target: Path, data: bytes, flags: int) -> None:
            if target == path:
                self.append(target, data[: min(cut, len(data) - 1)], flags)
                raise KeyboardInterrupt
            self.append(target, data, flags)

        self._advance_with(torn)
        self.run = None

    @precondition(lambda self: self.run is not None and not self.run.done)
    @rule(file=st.sampled_from(["metrics", "rollouts", "events"]), once=st.booleans())
    def full_disk_in_a_write(self, file: str, once: bool) -> None:
        """There is room again once the reserve is freed, or there is none and the run ends."""
        path: Path = getattr(self.directory, file)
        hidden = self.directory.path / files.RESERVE

        def full(target: Path, data: bytes, flags: int) -> None:
            if target == path and (hidden.exists() or not once):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            self.append(target, data, flags)

        failed = self._advance_with(full)
        assert failed == (not once)
        if failed:
            assert not hidden.exists(), "the reserve was freed before it was given up"
            self.run = None

    def _advance_with(self, append: Any) -> bool:
        assert self.run is not None
        files._append = append
        try:
            self.run.advance()
        except (OSError, KeyboardInterrupt):
            return True
        finally:
            files._append = self.append
        return False

    @precondition(lambda self: self.run is None)
    @rule(file=st.sampled_from(["metrics", "rollouts", "events"]), at=st.integers(0, 30))
    def damage_a_line(self, file: str, at: int) -> None:
        path: Path = getattr(self.directory, file)
        lines = path.read_bytes().splitlines(keepends=True)
        if lines:
            lines[at % len(lines)] = b"\xff" * 7 + b"\n"
            path.write_bytes(b"".join(lines))

    @precondition(lambda self: self.run is None)
    @rule(back=st.integers(1, 2), manifest=st.booleans())
    def damage_a_checkpoint(self, back: int, manifest: bool) -> None:
        found = sorted(self.directory.checkpoints.glob("version-*"))[-back:]
        if found:
            path = found[0] / ("manifest.json" if manifest else "state.safetensors")
            path.write_bytes(path.read_bytes()[:-1])

    @precondition(lambda self: self.run is None)
    @rule()
    def resume(self) -> None:
        self.run = resumed(self.directory)

    @invariant()
    def one_owner(self) -> None:
        """Whatever was done, the lease can be had, and is let go of."""
        with hold_lease(self.directory.path, lambda line: None) as lease:
            assert lease.lost == ""

    def teardown(self) -> None:
        try:
            if self.run is None:
                self.run = resumed(self.directory)
            while not self.run.done:
                self.run.advance()
            for name in ("metrics.jsonl", "rollouts.jsonl"):
                struck, calm = self.directory.path / name, self.calm.path / name
                assert struck.read_bytes() == calm.read_bytes(), name
            files.read_rows(self.directory.events)  # no damaged line is left
            partial = [p for p in self.directory.path.rglob("*") if p.name.endswith(".partial")]
            assert partial == []
            last = max(self.directory.checkpoints.glob("version-*"))
            assert last.name == max(p.name for p in self.calm.checkpoints.glob("version-*"))
        finally:
            shutil.rmtree(self.folder)


TestRunModel = RunModel.TestCase
TestRunModel.settings = settings(
    max_examples=int(os.environ.get("FORGE_SEQUENCES", "8")),
    stateful_step_count=25,
    deadline=None,
)
