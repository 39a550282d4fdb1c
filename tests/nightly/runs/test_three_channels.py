"""Deaths in a run of meshes/three_channels.yaml change nothing of it, to the byte."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from channel_runs import WITHOUT_TEACHERS, command, directory, pids, wait_for, whole_run
from chaos import OF_CHANNELS
from small_run import run_to_end, running

from protocols.files import read_rows

SEVERAL_UPDATES = {
    "train.updates_per_rollout": 2,
    "train.minibatches": 2,
    "objective.grpo.kl": 0.05,
    "objective.grpo.kl_reference": "version",
    "objective.grpo.kl_refresh": 3,
    "objective.grpo.refill": 2,
}
WITHOUT_ASKING = (*(role for role in OF_CHANNELS if role != "teacher_replay"), "store")


def test_deaths_of_desk_hint_teacher_store_and_controller_change_nothing(tmp_path: Path) -> None:
    """kill -9 of each while it is wanted, then of the controller: the run that goes on by itself,
    and is resumed, ends as the undisturbed one does, to the byte. Also with four updates a step, a
    reference that is renewed, refills, the average of the cartridges that reads the hints, and
    hints that the generator writes."""
    hints = {"objective.sdpo.teacher": "ema", "objective.sdpo.hints": "model"}
    sets = WITHOUT_TEACHERS | SEVERAL_UPDATES | hints
    calm = whole_run(tmp_path / "calm", **sets).path
    rows = read_rows(calm / "metrics.jsonl")
    assert all(row["channels"]["grpo"].get("updates") == 4 for row in rows)
    assert sum(row["episodes"]["refill/sampled"] for row in rows) > 0
    assert any(row["channels"]["grpo"].get("approx_kl_last", 0) > 0 for row in rows)
    root = tmp_path / "struck"
    with running(command(root, **sets), root) as run:
        wait_for(root, 1)
        for role in WITHOUT_ASKING:
            (pid,) = pids(root)[role]
            os.kill(pid, signal.SIGKILL)
        wait_for(root, 2)
        (controller,) = [json.loads((directory(root) / "endpoints.json").read_text())["pid"]]
        os.kill(controller, signal.SIGKILL)
        run.process.communicate(timeout=180)
        run.wait_until_gone(60)
    lost = [
        e["role"]
        for e in read_rows(directory(root) / "events.jsonl")
        if e["event"] == "replica_lost"
    ]
    assert set(lost) >= set(WITHOUT_ASKING)
    process = run_to_end(command(root, "--resume", **sets))
    assert process.returncode == 0, process.stdout + process.stderr
    for name in ("metrics.jsonl", "episodes.jsonl"):
        assert (directory(root) / name).read_bytes() == (calm / name).read_bytes(), name
