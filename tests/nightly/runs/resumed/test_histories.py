"""Runs that earlier commits of this repository made and left, one a day: today's code goes on with
each and comes to the end that it comes to by itself, or refuses it by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from histories import FOLDER, KILLED_AFTER, SETS, STEPS, command, unpack
from small_run import ROOT, latest, rows, run_to_end

ARCHIVES = sorted(FOLDER.glob("*.tar.xz"))
CHECKPOINT = SETS["train.checkpoint_every"]
LIMIT_BYTES = 1_500_000


def test_the_recorded_runs_are_of_these_days_and_small() -> None:
    days = [path.name[:10] for path in ARCHIVES]
    assert days[:8] == [f"2026-11-{day}" for day in range(22, 30)]
    assert sum(path.stat().st_size for path in ARCHIVES) <= LIMIT_BYTES


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run made by today's code alone."""
    root = tmp_path_factory.mktemp("calm")
    process = run_to_end(command(ROOT, root))
    assert process.returncode == 0, process.stdout + process.stderr
    return latest(root)


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name[:19])
def test_a_run_of_an_earlier_commit_goes_on(archive: Path, calm: Path, tmp_path: Path) -> None:
    path = unpack(archive, tmp_path)
    before = (path / "metrics.jsonl").read_bytes().splitlines()[:KILLED_AFTER]
    # Without a file of its state, as up to 25 November, a run goes on from its checkpoint.
    kept = KILLED_AFTER if (path / "checkpoints/run-state.json").is_file() else CHECKPOINT
    process = run_to_end(command(ROOT, tmp_path, "--resume"))
    assert process.returncode == 0, process.stdout + process.stderr
    assert latest(tmp_path) == path

    # What was done stands as it was written, and each step once.
    after = (path / "metrics.jsonl").read_bytes().splitlines()
    assert after[:kept] == before[:kept]
    metrics, wanted = rows(path / "metrics.jsonl"), rows(calm / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    # What is left comes out as it does in a run of today: its state was read right.
    for row, same in zip(metrics, wanted, strict=True):
        assert row["kl"] == pytest.approx(same["kl"], rel=1e-3)
    (found, same) = (rows(p / "rollouts.jsonl") for p in (path, calm))
    key = ("arm", "step", "id", "response_ids")
    assert [[r[k] for k in key] for r in found] == [[r[k] for k in key] for r in same]
    results = json.loads((path / "results.json").read_text())
    assert results["status"] == "finished"


def test_a_run_whose_key_is_gone_is_refused_by_name(tmp_path: Path) -> None:
    path = unpack(ARCHIVES[0], tmp_path)
    spec = path / "spec.yaml"
    text = spec.read_text()
    assert "  self_study: null\n" in text
    spec.write_text(text.replace("  self_study: null\n", "  self_study:\n    kinds: [question]\n"))
    line = spec.read_text().splitlines().index("    kinds: [question]") + 1
    files = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    process = run_to_end(command(ROOT, tmp_path, "--resume"))
    assert process.returncode == 2
    said = " ".join(process.stderr.split())
    assert f"unknown key kinds at {spec}:{line} (learn.self_study.kinds)" in said
    assert "the run was made by another version: use that one, or start a new run" in said
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == files
