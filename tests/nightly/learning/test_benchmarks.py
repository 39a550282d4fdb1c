"""The trainer's benchmarks, run small: what their tables claim of a step, extraction and starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

from benchmarks.record import read
from cartridge_forge.protocols.spec.cartridge import Init


def rows_of(module: str, out: Path, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", module, "--out", str(out), *options]
    subprocess.run(command, check=True, timeout=200, capture_output=True)
    rows: list[dict[str, Any]] = read(out)["results"]
    return rows


def test_every_start_is_trained_and_asked_the_same_questions(tmp_path: Path) -> None:
    small = {"data.patients": 2, "rollout.prompts": 4, "evaluate.questions": 4}
    small |= {"train.steps": 1, "train.warmup_steps": 1}
    sets = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    rows = rows_of("studies.accuracy", tmp_path / "starts.json", "initialization", *sets)
    assert [row["init"] for row in rows] == list(get_args(Init))
    for row in rows:
        assert row["untrained"]["n"] == row["trained"]["n"] == 4
        assert row["first_kl"] == row["last_kl"] > 0  # of one step


def test_a_whole_chart_gives_every_fact_back_and_no_document_hardly_any(tmp_path: Path) -> None:
    small = {"data.patients": 1, "train.steps": 1, "train.warmup_steps": 1}
    sets = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    rows = rows_of("studies.accuracy", tmp_path / "extraction.json", "extraction", *sets)
    found = {row["prefix"]: row["counts"] for row in rows}
    assert list(found) == ["none", "untrained", "trained", "whole"]
    facts = [count["n"] for count in found["whole"]]
    assert facts[:3] == [24, 24, 24]
    assert found["whole"][0]["right"] == 24
    assert found["whole"][2]["right"] >= 20
    assert found["none"][0]["right"] <= 4
    assert found["none"][2]["right"] == 0


def test_a_step_reads_its_document_once(tmp_path: Path) -> None:
    """The benchmark itself refuses a row whose two gradients differ."""
    plot = tmp_path / "step.svg"
    short, long = rows_of(
        "benchmarks.step", tmp_path / "step.json", "--batches", "4", "--documents", "64", "1024",
        "--steps", "1", "--plot", str(plot),
    )  # fmt: skip
    assert 0 < short["ratio"] != long["ratio"] > 0
    needed = {"rollout", "teacher", "train", "publish", "whole"}
    assert long["theirs"].keys() == needed | {"old log-probabilities"}
    assert long["ours"].keys() == needed
    assert plot.read_text().count("<svg") == 1
