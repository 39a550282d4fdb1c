"""Play an order of blows over a short run with real processes: kills, stops, control calls, full
disks, damage, and a resume after each end that is not the last.

    told = play(PLAIN, start, root, [("client killed", 2, 0), ("paused", 3, 4)])
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos import HASTY, OF_CHANNELS, REPLACED, Eye
from forkserver_of_runs import Start
from hypothesis import strategies as st
from small_disk import FILLER, fill
from small_run import MESH, ROOT, SMALL, Running, command, latest, run_to_end

from cartridge_forge.plugins.watch.commands.control_client import ControlClient, ControlTarget
from cartridge_forge.plugins.watch.control.endpoints import read_endpoints
from cartridge_forge.protocols.errors import ControlError

LIMIT_SECONDS = 300.0
STEPS = 4  # of each trained arm
Blow = Callable[[Running], None]
Order = list[tuple[str, int, int]]  # blow, steps that are recorded by then, tenths of a second more

# Starts and ends are what a run of few steps takes, so evaluations are as small as they can be.
FEW: dict[str, Any] = {
    **HASTY,
    "train.steps": STEPS,
    "train.warmup_steps": 2,
    "train.checkpoint_every": 2,
    "evaluate.arms": ["on_policy", "offline"],
    "evaluate.questions": 2,
    "evaluate.probe_every": 3,
    "evaluate.probe_questions": 2,
    "evaluate.sampled": False,
}
CAP, AT_ONCE = 0.5, 8
TEACHER: dict[str, Any] = {
    "name": "gpt", "provider": "openai", "model": "local-gpt", "key_env": "FORGE_TEST_TEACHER_KEY",
    "prices": {"input": 1.25, "output": 10.0}, "concurrency": AT_ONCE, "backoff_s": 0.01,
}  # fmt: skip
# Hints are waited for, so that the bytes do not hang on when an answer comes.
PAID: dict[str, Any] = {
    **FEW,
    "evaluate.arms": ["on_policy"],
    "episodes.tasks": 2,
    "episodes.group": 3,
    "objective.alpha_warmup_steps": 0,
    "objective.beta": 0.0,
    "objective.compare_every": 0,
    "objective.sdpo.hints": "model",
    "objective.sdpo.hint_writer": "gpt",
    "objective.sdpo.hint_timeout_s": 120.0,
    "replay.cap": CAP,
    "replay.quorum": 1,
    "replay.local": None,
    "roles.generator.replicas": 1,
    "roles.teacher_replay.replicas": 1,
    "roles.trainer.threads": 1,
    **{f"roles.{role}.restarts": 1000 for role in OF_CHANNELS},
}


@dataclass(frozen=True)
class Kind:
    """A run that orders are played over: its mesh, its overrides, and the steps that it records."""

    mesh: str
    sets: Mapping[str, Any]
    steps: int
    blows: Mapping[str, Blow]

    def words(self, root: Path, *extra: str, **sets: Any) -> list[str]:
        """The command line, behind the command. Every run is in the folder that `latest` reads."""
        words = [str(ROOT / "meshes" / f"{self.mesh}.yaml"), "--run-dir", str(root), *extra]
        for key, value in {"name": MESH.stem, **self.sets, **sets}.items():
            words += ["--set", f"{key}={json.dumps(value)}"]
        return words

    def orders(self, first: int) -> st.SearchStrategy[Order]:
        """One to four blows by time. Blow `first`, alone right after step 1, is the first that is
        drawn: hypothesis begins with the simplest."""
        names = sorted(self.blows)
        names = [*names[first % len(names) :], *names[: first % len(names)]]
        act = st.tuples(st.sampled_from(names), st.integers(1, self.steps), st.integers(0, 5))
        acts = st.lists(act, min_size=1, max_size=4)
        return acts.map(lambda order: sorted(order, key=lambda act: act[1:]))


def signal_client(number: signal.Signals) -> Blow:
    return lambda run: run.process.send_signal(number)


def kill_controller(run: Running) -> None:
    """Kill it, unless it is yet to start: the file may be of the run that died before."""
    with suppress(ControlError):
        if (pid := read_endpoints(latest(run.root)).pid) in run.alive():
            os.kill(pid, signal.SIGKILL)


def full_disk(run: Running) -> None:
    """Take all room, where the test has a disk of its own."""
    fill(run.root)


def kill_replica(role: str) -> Blow:
    def blow(run: Running) -> None:
        eye = Eye(run, 0.0)
        with suppress(ProcessLookupError, IndexError):
            os.kill(eye.replicas(role)[0].pid, signal.SIGKILL)
        eye.close()

    return blow


def control(act: Callable[[ControlClient], object]) -> Blow:
    def blow(run: Running) -> None:
        path = latest(run.root)
        # A run may end before it is asked, or while it answers.
        with (
            suppress(ControlError),
            ControlClient(ControlTarget(read_endpoints(path).control, path)) as client,
        ):
            act(client)

    return blow


def scaled(role: str, replicas: int) -> Blow:
    return control(lambda client: client.scale(role, replicas))


def stand_still(seconds: float) -> Blow:
    """Stop every process for a while, as a paused container or a closed lid does."""

    def blow(run: Running) -> None:
        run.stand_still(seconds)

    return blow


PAUSED = "paused"  # until the next blow has fallen
resume = control(lambda client: client.resume())
OF_ANY: Mapping[str, Blow] = {
    "client killed": signal_client(signal.SIGKILL),
    "stopped": signal_client(signal.SIGTERM),
    "hung up": signal_client(signal.SIGHUP),
    "controller killed": kill_controller,
    "disk full": full_disk,
    PAUSED: control(lambda client: client.pause()),
    "checkpoint": control(lambda client: client.checkpoint()),
    **{f"all still for {seconds} s": stand_still(seconds) for seconds in (2, 8, 20)},
    **{f"{role} killed": kill_replica(role) for role in REPLACED},
}
PLAIN = Kind(
    "longhealth", {**SMALL, **FEW, "rollout.prompts": 4}, 2 * STEPS,
    {**OF_ANY, "scaled to 3": scaled("generator", 3), "scaled to 1": scaled("generator", 1)},
)  # fmt: skip
PAYING = Kind(
    "three_channels", PAID, STEPS,
    {
        **OF_ANY,
        **{f"{role} killed": kill_replica(role) for role in OF_CHANNELS},
        "teachers scaled to 2": scaled("teacher_replay", 2),
    },
)  # fmt: skip


def steps_done(root: Path) -> int:
    path = latest(root) / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def damage(path: Path) -> None:
    """Cut the newest checkpoint's cartridge, unless it is the only one, and tear a log's end."""
    found = sorted((path / "checkpoints").glob("version-*"))
    if len(found) > 1:
        part = next(found[-1].glob("cartridge-*"))
        part.write_bytes(part.read_bytes()[:-1])
    with (path / "events.jsonl").open("ab") as log:
        log.write(b'{"time')


def play(kind: Kind, start: Start, root: Path, order: Order, **sets: Any) -> list[str]:
    """Run to the end, with each blow once so many steps are recorded; returns what happened."""
    told, left, extra = [], list(order), ()
    for _ in range(len(order) + 1):
        with start(kind.words(root, *extra, **sets), root) as run:
            strike(kind, run, left, told)
            said, _ = run.process.communicate(timeout=LIMIT_SECONDS)
            run.wait_until_gone(LIMIT_SECONDS)
        told.append(f"exit code {run.process.returncode}: {said[-300:]}")
        assert "Traceback" not in said, told
        if run.process.returncode == 0:
            return told
        (root / FILLER).unlink(missing_ok=True)
        if latest(root).joinpath("events.jsonl").is_file():
            damage(latest(root))
        extra = ("--resume",)
    raise AssertionError("\n".join(told))


def strike(kind: Kind, run: Running, left: Order, told: list[str]) -> None:
    """Let the blows of `left` fall, until none is left or the run has ended."""
    eye, paused = Eye(run, float("inf")), False
    while left:
        name, step, tenths = left[0]
        least = 0 if paused else step
        if not eye.wait(lambda least=least: steps_done(run.root) >= least, to_end=True):
            break
        left.pop(0)
        eye.idle(tenths / 10)
        told.append(f"step {steps_done(run.root)}: {name}")
        kind.blows[name](run)
        eye.idle(0.2)  # so that an end is seen before the next blow falls
        if paused:
            resume(run)
        paused = name == PAUSED
    if paused:
        resume(run)
    eye.close()


def calm_run(kind: Kind, root: Path, **sets: Any) -> Path:
    """The run of `kind` that nothing befalls, started as a user starts it."""
    process = run_to_end([*command(root)[:3], *kind.words(root, **sets)])
    assert process.returncode == 0, process.stdout + process.stderr
    return latest(root)
