"""The rows of a GPU's check: a failure is named with its place, and takes no other row with it."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.__main__ import GROUPS, arguments, checks_of, rows_of, whole_step
from benchmarks.gpu.rows import (
    FAILED,
    NOT_RUN,
    OK,
    TOLD,
    Check,
    CheckRow,
    Outcome,
    run_checks,
    table,
)
from benchmarks.gpu.scene import SCENES, CheckScene


def broken() -> Outcome:
    raise RuntimeError("an illegal | address")


def test_a_check_that_raises_is_a_row_and_the_next_one_runs() -> None:
    rows = list(
        run_checks(
            [
                Check("first", "<= 1", lambda: Outcome("2", False, {"x": 2})),
                Check("second", "", broken),
                Check("third", "", lambda: Outcome("3 s")),
                Check("fourth", "<= 9", lambda: Outcome("1", True)),
            ]
        )
    )
    assert [row.verdict for row in rows] == [FAILED, FAILED, TOLD, OK]
    assert "RuntimeError at tests/unit/benchmarks/test_gpu_rows.py:" in rows[1].error
    lines = table(rows).splitlines()
    assert lines[0] == "| row | wanted | found | verdict |"
    assert lines[2] == "| first | <= 1 | 2 | FAILED |"
    assert [line.count("|") for line in lines] == [5] * 6  # no text breaks a cell


@pytest.mark.parametrize(
    ("ends", "says"), [(139, "exit code 139"), (None, "was stopped after")]
)  # fmt: skip
def test_a_group_that_dies_names_the_row_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: int | None, says: str
) -> None:
    rows = tmp_path / "rows"

    def run(command: list[str], **given: Any) -> subprocess.CompletedProcess[bytes]:
        done = CheckRow("a", "", "1", OK).as_dict()
        names = [["a", ""], ["b", "<= 1"], ["c", ""]]
        rows.write_text(f"{json.dumps(names)}\n{json.dumps(done)}\n")
        if ends is None:
            raise subprocess.TimeoutExpired(command, 1.0)
        return subprocess.CompletedProcess(command, ends)

    monkeypatch.setattr(subprocess, "run", run)
    asked = argparse.Namespace(scene="tiny", device="cpu")
    found = rows_of("costs", asked, rows, 1.0)
    assert [(row.name, row.verdict) for row in found] == [("a", OK), ("b", FAILED), ("c", NOT_RUN)]
    assert says in found[1].error
    rows.unlink()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess("", 1))
    (lost,) = rows_of("costs", asked, rows, 1.0)
    assert (lost.name, lost.verdict) == ("costs", FAILED)


def test_a_whole_step_is_the_sum_of_its_phases() -> None:
    names = ("rollout on vLLM", "teacher, embedded", "student, embedded", "publish, one cartridge")
    rows = [CheckRow(n, "", figures={"seconds": 2.0**-i}) for i, n in enumerate(names)]
    (step,) = whole_step(rows, "3b")
    assert (step.found, step.verdict) == ("1.88 s", OK)
    rows[0] = CheckRow(names[0], "", figures={"seconds": 1.3})
    assert whole_step(rows, "3b")[0].verdict == FAILED
    assert whole_step(rows, "tiny")[0].verdict == TOLD
    assert whole_step(rows[1:], "3b") == []  # vLLM did not run


def test_the_published_sizes_are_not_tried_without_a_gpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        arguments(["--device", "cpu"])
    assert "add --tiny" in capsys.readouterr().err


def test_every_scene_has_a_plan_of_its_own_sizes() -> None:
    for name, setting in SCENES.items():
        scene = CheckScene(setting, torch.device("cpu"))
        work, learn = setting.step.work, scene.spec.learn
        assert learn.model.shape == setting.step.shape, name
        assert (learn.cartridge.tokens, learn.rollout.prompts) == (work.cartridge, work.samples)
        assert learn.rollout.max_tokens == work.response
        names = [check.name for group in GROUPS for check in checks_of(group, scene)]
        assert len(names) == len(set(names)) >= 15
