"""Workers that share no directory with the controller: what they write goes through a bucket."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from s3_server import s3_server
from small_run import Finished, command, latest, rows, run_to_end, running, same_outcome

FORGE = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"
ALONE = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--map-root-user", "--mount")
# An empty folder in place of the runs', in this worker's own mounts.
HIDDEN = 'mount -t tmpfs none "$1" && shift && exec "$@"'
KEPT: dict[str, Any] = {
    "records.store": "s3://runs",
    # Processes that are not forked import torch for long on a busy machine, and are not dead.
    "health.suspect_after_s": 60, "health.dead_after_s": 120, "spawn_timeout_s": 300,
}  # fmt: skip
WORKERS = 3  # generator, teacher, trainer


@contextmanager
def workers(runs: Path) -> Iterator[list[str]]:
    """Workers on loopback that see an empty folder at `runs`; their addresses."""
    with ExitStack() as held:
        found = []
        for _ in range(WORKERS):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
            words = [sys.executable, "-c", FORGE, "worker", "--address", address, "--grace", "1"]
            process = subprocess.Popen(
                [*ALONE, "sh", "-c", HIDDEN, "sh", str(runs), *words],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            held.callback(process.wait, 60)
            held.callback(os.killpg, process.pid, signal.SIGKILL)
            found.append(address)
        yield found


def test_a_trainer_apart_dies_and_the_run_is_killed_and_both_go_on(
    tmp_path: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    if subprocess.run([*ALONE, "mount", "-t", "tmpfs", "none", "/mnt"], check=False).returncode:
        pytest.skip("mounts of its own cannot be made here")
    runs = tmp_path / "runs"
    runs.mkdir()
    with s3_server() as server, ExitStack() as held:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        addresses = held.enter_context(workers(runs))
        words = [*command(runs, **KEPT), "--set", among(addresses)]
        with running(words, runs) as run:
            path = run.wait_for("on_policy", 3)
            (pid,) = pids_of(path, "trainer")
            os.kill(pid, signal.SIGKILL)
            run.wait_for("on_policy", 5)
            assert not list((path / "checkpoints").glob("version-*")), "they are the trainer's"
            for process in run.alive():
                os.kill(process, signal.SIGKILL)
        held.close()
        shutil.rmtree(path.parent)
        fresh = held.enter_context(workers(runs))
        resumed = run_to_end([*words[:-1], among(fresh), "--resume", "unfinished"])
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        assert latest(runs).name == path.name
        same_outcome(latest(runs), finished.path)


def among(addresses: list[str]) -> str:
    """The setting of hosts that are these workers."""
    return f"hosts={json.dumps({'kind': 'addresses', 'addresses': addresses})}"


def pids_of(path: Path, role: str) -> list[int]:
    """The process of a role, by the events."""
    events = [e for e in rows(path / "events.jsonl") if e["event"] == "role_ready"]
    return next(e["pids"] for e in events if e["role"] == role)
