"""Test sweeps and ablations of whole runs."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from small_run import ROOT, run_to_end, running

from cartridge_forge.forge_run.experiments.child_run import ChildRun, run_side_by_side
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.files import read_rows

pytestmark = [pytest.mark.timeout(900)]

SWEEP: dict[str, Any] = {
    "name": "tiny",
    "mesh": str(ROOT / "meshes" / "longhealth.yaml"),
    "seeds": 1,
    "set": {
        "train.steps": 2,
        "train.warmup_steps": 1,
        "rollout.prompts": 2,
        "data.patients": 1,
        "evaluate.questions": 4,
        "roles.generator.replicas": 1,
        "spares": 0,
        "plane": "shared_memory",
    },
    "axes": {"cartridge.tokens": [28, 12]},
    "variants": [{"arms": {"untrained": "first tokens", "on_policy": "on policy"}}],
}


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(json.dumps(SWEEP))
    code = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"
    command = [sys.executable, "-c", code, "sweep", str(file), "--run-dir", str(tmp_path)]
    first = run_to_end([*command, "--jobs", "2"], timeout=400)
    assert first.returncode == 0, first.stdout + first.stderr
    began = [i for i, x in enumerate(first.stdout.splitlines()) if ": runs, see" in x]
    ended = [i for i, x in enumerate(first.stdout.splitlines()) if ": finished in" in x]
    assert max(began) < min(ended), "the second began before the first ended"
    told = json.loads((tmp_path / "sweep-tiny" / "sweep.json").read_text())
    assert [(row["point"], row["arm"]) for row in told["rows"]] == [
        ({"cartridge.tokens": p}, arm) for p in (28, 12) for arm in ("first tokens", "on policy")
    ]
    assert len(told["runs"]) == 2
    for name, run in told["runs"].items():
        tokens = int(name.partition("=")[2].split()[0])
        directory = tmp_path / "longhealth" / run
        results = json.loads((directory / "results.json").read_text())
        assert results["compression"]["cartridge_tokens"] == tokens
        assert len(read_rows(directory / "metrics.jsonl")) == 2

    second = run_to_end(command, timeout=120)
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("finished before") == 2
    table = first.stdout.partition("\nsweep tiny")[2]
    assert second.stdout.partition("\nsweep tiny")[2] == table != ""


ARMS = ["grpo", "+sdpo", "+replay", "all"]
SMALL: dict[str, Any] = {
    "train.steps": 2,
    "train.warmup_steps": 1,
    "episodes.tasks": 2,
    "episodes.group": 2,
    "objective.alpha_warmup_steps": 0,
    "objective.w_doc": 0,
    "evaluate.questions": 4,
    "roles.generator.replicas": 1,
    "roles.teacher_replay.replicas": 1,
    "roles.trainer.threads": 1,
    "spares": 0,
    "plane": "shared_memory",
}


def command(root: Path, **sets: Any) -> list[str]:
    code = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"
    mesh = str(ROOT / "meshes" / "three_channels.yaml")
    words = [sys.executable, "-c", code, "ablate", mesh, "--run-dir", str(root), "--seeds", "1"]
    for key, value in {**SMALL, **sets}.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return words


def home(root: Path) -> Path:
    return root / "sweep-ablate-three_channels"


def test_every_arm_begins_alike_and_a_second_call_runs_nothing(tmp_path: Path) -> None:
    first = run_to_end(command(tmp_path), timeout=700)
    assert first.returncode == 0, first.stdout + first.stderr
    record = json.loads((home(tmp_path) / "sweep.json").read_text())
    assert list(record["runs"]) == ["untrained+grpo/0", *(f"{arm}/0" for arm in ARMS[1:])]
    rows = {row["arm"]: row for row in record["rows"]}
    assert list(rows) == ["untrained", *ARMS]

    began = []
    for arm, run in zip(ARMS, record["runs"].values(), strict=True):
        directory = tmp_path / "three_channels" / run
        episodes = [row for row in read_rows(directory / "episodes.jsonl") if row["step"] == 1]
        assert len(episodes) == 4
        for turn in (turn for episode in episodes for turn in episode["turns"]):
            if arm not in ("+sdpo", "all"):  # which alone ask for hints
                assert "hint" not in turn
            turn.pop("hint", None), turn.pop("no_hint", None)
        began.append(episodes)
        results = json.loads((directory / "results.json").read_text())
        assert rows[arm]["accuracy"] == [results["arms"]["on_policy"]["accuracy"]]
        assert (rows[arm]["dollars"] > 0) == (arm in ("+replay", "all"))
    assert all(episodes == began[0] for episodes in began)

    title, _, *table = first.stdout.partition("sweep ablate-")[2].splitlines()
    assert title == "three_channels, 1 seed"
    assert [line.split()[0] for line in table[:5]] == ["untrained", *ARMS]

    second = run_to_end(command(tmp_path), timeout=120)
    assert second.returncode == 0, second.stderr
    assert len(re.findall(r"finished before", second.stdout)) == len(ARMS)
    assert second.stdout.partition("sweep ablate-")[2] == first.stdout.partition("sweep ablate-")[2]
    assert len(list((tmp_path / "three_channels").glob("2*"))) == len(ARMS)


def test_sigterm_stops_the_run_of_an_arm_with_its_checkpoint(tmp_path: Path) -> None:
    with running(command(tmp_path, **{"train.steps": 5000}), tmp_path) as run:
        metrics = tmp_path / "three_channels" / "latest" / "metrics.jsonl"
        deadline = time.monotonic() + 180
        while not (metrics.exists() and read_rows(metrics)):
            assert time.monotonic() < deadline, "no step came"
            time.sleep(0.05)
        run.process.send_signal(signal.SIGTERM)
        run.process.communicate(timeout=60)
        assert run.process.returncode == 128 + signal.SIGTERM
        run.wait_until_gone(30)
    results = json.loads((metrics.parent / "results.json").read_text())
    assert results["status"] == "stopped"
    assert not (home(tmp_path) / "sweep.json").exists()


def test_a_run_that_fails_is_told_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "grpo-0.log"
    with pytest.raises(RunError) as caught:
        list(run_side_by_side([ChildRun("grpo, seed 0", ("no.yaml",), log)], print, 1))
    assert str(caught.value) == (
        "grpo, seed 0 ended with 2: error: there is no file no.yaml; check the path; see "
        f"{log}, and give the same command again to go on"
    )
    assert log.read_text() == "error: there is no file no.yaml; check the path\n"
