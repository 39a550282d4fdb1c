"""Slurm's tools over a directory, for one job: they run what is submitted as local processes.

    with cluster(directory) as slurm:         # sbatch, squeue, scancel and srun are on PATH
        slurm.set(state="PENDING", reason="Resources")

Their output has the fields, and the shape, that the real ones print (Slurm 24.11). Nodes are
loopback addresses (127.0.0.2, ...), by which workers of one port stand beside one another.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

STATE = "FORGE_FAKE_SLURM"
TOOLS = ("sbatch", "squeue", "scancel", "srun")
JOB = "4711"


class Cluster:
    """The state that the tools share, in `state.json`.

    state, reason   of the job once it is submitted: RUNNING starts it
    refuses         what sbatch says when it takes no job
    silent          squeue fails so many times
    nodes_as        "allocation" (24.05 and newer) or "text" (older)
    delay_s         before a worker starts
    broken          no worker starts
    mute            sbatch does not say "Submitted batch job"
    stuck           scancel does nothing
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def set(self, **facts: Any) -> None:
        made = self.directory / f"state.{os.getpid()}"
        made.write_text(json.dumps({**self.facts, **facts}))
        made.replace(self.directory / "state.json")

    @property
    def facts(self) -> dict[str, Any]:
        with suppress(OSError):
            found: dict[str, Any] = json.loads((self.directory / "state.json").read_text())
            return found
        return {}

    def preempt(self) -> None:
        end(self)
        self.set(state="PREEMPTED")

    @property
    def script(self) -> str:
        return (self.directory / "script").read_text()


@contextmanager
def cluster(directory: Path, patch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    tools = directory / "bin"
    tools.mkdir(parents=True)
    for tool in TOOLS:
        made = tools / tool
        made.write_text(f'#!/bin/sh\nexec {sys.executable} -S {__file__} {tool} "$@"\n')
        made.chmod(0o755)
    patch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    patch.setenv(STATE, str(directory))
    slurm = Cluster(directory)
    slurm.set(state="RUNNING", reason="None")
    try:
        yield slurm
    finally:
        end(slurm)


def options(script: str) -> dict[str, str]:
    """`{"nodes": "2"}` of a script's #SBATCH lines; the last of a name."""
    lines = (line for line in script.splitlines() if line.startswith("#SBATCH --"))
    found = [line.removeprefix("#SBATCH --").partition("=") for line in lines]
    return {name: value for name, _, value in found}


def sbatch(slurm: Cluster) -> None:
    facts = slurm.facts
    if facts.get("refuses"):
        sys.exit(f"sbatch: error: {facts['refuses']}")
    script = sys.stdin.read()
    (slurm.directory / "script").write_text(script)
    asked = options(script)
    pid = 0
    if facts["state"] == "RUNNING":
        out, err = (asked[way].replace("%j", JOB) for way in ("output", "error"))
        exported = dict(pair.split("=", 1) for pair in asked["export"].split(",")[1:])
        with Path(out).open("w") as written, Path(err).open("w") as complained:
            pid = subprocess.Popen(
                ["bash", slurm.directory / "script"], stdin=subprocess.DEVNULL, stdout=written,
                stderr=complained, start_new_session=True,
                env={**os.environ, **exported, "SLURM_JOB_ID": JOB},
            ).pid  # fmt: skip
    slurm.set(name=asked["job-name"], nodes=int(asked["nodes"]), pid=pid)
    say(f"Submitted batch job {JOB}" if not facts.get("mute") else JOB)


def srun(slurm: Cluster, python: str, flag: str, code: str) -> None:
    """One worker for each node, which believes that the node's name is this machine's."""
    facts = slurm.facts
    time.sleep(facts.get("delay_s", 0))
    if facts.get("broken"):
        sys.exit("error: execve(): No such file or directory")
    workers = []
    for rank, node in enumerate(node_names(facts)):
        named = f"import socket; socket.gethostname = lambda: {node!r}\n{code}"
        env = {**os.environ, "SLURM_NODEID": str(rank)}
        workers.append(subprocess.Popen([python, flag, named], env=env))
    sys.exit(max(worker.wait() for worker in workers))


def squeue(slurm: Cluster, *words: str) -> None:
    facts = slurm.facts
    if facts.get("silent", 0) > 0:
        slurm.set(silent=facts["silent"] - 1)
        sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    state, reason = facts["state"], facts["reason"]
    if facts.get("pid") and state == "RUNNING" and not lives(facts["pid"]):
        state, reason = "FAILED", "NonZeroExitCode"
    if "--json" not in words:
        assert words == ("--me", "--noheader", "--states=all", "--format=%i|%T|%r|%j"), words
        say("4690|RUNNING|None|another")
        if "name" in facts and state != "gone":
            say(f"{JOB}|{state}|{reason}|{facts['name']}")
        return
    assert words in (("--job", JOB, "--json"), ("--me", "--json")), words
    nodes: dict[str, Any] = {"nodes": ",".join(node_names(facts))}
    if facts.get("nodes_as", "allocation") == "allocation":
        allocation = [{"index": i, "name": n} for i, n in enumerate(node_names(facts))]
        nodes = {"nodes": {"count": len(allocation), "allocation": allocation}}
    job = {"job_id": int(JOB), "name": facts["name"], "job_state": [state]}
    job |= {"state_reason": reason, "job_resources": nodes}
    say(json.dumps({"jobs": [job], "errors": [], "warnings": []}))


def scancel(slurm: Cluster, job: str) -> None:
    assert job == JOB
    if not slurm.facts.get("stuck") and slurm.facts["state"] in ("RUNNING", "PENDING"):
        end(slurm)
        slurm.set(state="CANCELLED", reason="None")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def end(slurm: Cluster) -> None:
    """Kill what the job started."""
    if slurm.facts.get("pid"):
        with suppress(ProcessLookupError):
            os.killpg(slurm.facts["pid"], signal.SIGKILL)


def node_names(facts: dict[str, Any]) -> list[str]:
    return [f"127.0.0.{2 + i}" for i in range(facts["nodes"])]


def alive(slurm: Cluster) -> list[str]:
    """The pids of the job's processes that run."""
    marks = {f"{STATE}={slurm.directory}".encode(), f"SLURM_JOB_ID={JOB}".encode()}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile
            if marks <= set((process / "environ").read_bytes().split(b"\0")):
                found.append(process.name)
    return found


def lives(pid: int) -> bool:
    """Whether it runs: one that nobody waits for stays as a zombie where there is no init."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    tool = {"sbatch": sbatch, "squeue": squeue, "scancel": scancel, "srun": srun}[sys.argv[1]]
    tool(Cluster(Path(os.environ[STATE])), *sys.argv[2:])  # type: ignore[operator]
