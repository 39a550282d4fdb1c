"""A run whose directory fails it ends soon, says why and what is kept, and can be resumed."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

from small_run import (
    Finished,
    command,
    end_of,
    rows,
    run_to_end,
    running,
    same_outcome,
    whole_and_resumed,
)

LIMIT_SECONDS = 120.0
# A process that is held is not taken for dead.
LONG: dict[str, Any] = {"train.steps": 1000, "evaluate.arms": ["on_policy"]}


def test_a_file_that_takes_no_more_ends_the_run(tmp_path: Path, finished: Finished) -> None:
    """As a full disk does, without root: every write to /dev/full fails with ENOSPC."""
    with running(command(tmp_path), tmp_path) as run:
        path = run.wait_for("on_policy", 2)
        (tmp_path / "full").symlink_to("/dev/full")
        shutil.copy(path / "metrics.jsonl", tmp_path / "kept")
        os.replace(tmp_path / "full", path / "metrics.jsonl")
        said = end_of(run)
    assert f"error: no room on the disk of {path}: No space left on device" in said
    assert "kept: checkpoint version-00000" in said
    os.replace(tmp_path / "kept", path / "metrics.jsonl")
    whole_and_resumed(tmp_path, finished.path)


def test_a_directory_that_is_removed_ends_the_run_and_is_not_made_again(tmp_path: Path) -> None:
    with running(command(tmp_path, **LONG), tmp_path) as run:
        path = run.wait_for("on_policy", 2)
        path.rename(tmp_path / "elsewhere")
        said = end_of(run)
    assert f"the run directory {path} was removed or moved" in said
    assert not path.exists()
    assert rows(tmp_path / "elsewhere" / "metrics.jsonl")


def test_a_dead_controller_is_noticed_and_torn_files_heal(
    tmp_path: Path, finished: Finished
) -> None:
    with running(command(tmp_path), tmp_path) as run:
        path = run.wait_for("on_policy", 5)
        (pid,) = [e["pid"] for e in rows(path / "events.jsonl") if e["event"] == "run_started"]
        os.kill(pid, signal.SIGKILL)
        said = end_of(run)
    assert f"the controller died; go on with --resume {path.name}" in said
    events = (path / "events.jsonl").read_bytes().splitlines(keepends=True)
    events[2:2] = [b'{"time": "2026-11-2\n']  # of a full disk that had room again
    (path / "events.jsonl").write_bytes(b"".join(events) + b'{"time')
    newest = max((path / "checkpoints").glob("version-*"))
    part = next(newest.glob("cartridge-*"))
    part.write_bytes(part.read_bytes()[:-1])
    (path / "checkpoints" / "run-state.json").unlink()  # else it goes on at its last state
    process = run_to_end(command(tmp_path, "--resume"))
    assert process.returncode == 0, process.stdout + process.stderr
    told = " ".join(process.stdout.split())
    assert "events.jsonl: removed a torn last line" in told
    assert "events.jsonl: removed damaged lines (3)" in told
    assert f"checkpoint {newest} is damaged: {part.name} does not match its checksum" in told
    assert f"set aside as damaged-{newest.name}" in told
    assert "going on from version-000002" in told
    same_outcome(path, finished.path)
