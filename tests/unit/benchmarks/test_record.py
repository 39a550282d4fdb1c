"""Test the records of benchmarks, and the rows of the check on a GPU."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
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
from benchmarks.record import (
    BASELINE,
    FIELDS,
    SUITE,
    Expected,
    check,
    compare,
    main,
    median_ratio,
    provenance,
    read,
    read_baseline,
    unknown,
    updated,
    write,
    write_baseline,
)
from benchmarks.tensor_plane import costs, fit
from cartridge_forge.protocols.errors import DataError

BEFORE = {
    "pools": {"efficiency": Expected(0.9, "higher", 1.5), "call": Expected(1.2, "lower", 2.0)}
}


def record(**ratios: float) -> dict[str, Any]:
    return {
        "benchmark": "pools", "command": "x", "commit": "x", "device": {}, "config": {},
        "ratios": ratios, "results": None,
    }  # fmt: skip


def test_a_record_names_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "/home/someone/text.txt", "--rounds", "3", "runs/a.txt"])
    paths = {"document": Path("/home/someone/text.txt"), "near": Path("runs/a.txt"), "rounds": 3}
    origin = provenance("users.laptop", {**paths, "out": Path("/home/someone/out.json")})
    assert origin["command"] == "python -m benchmarks.users.laptop text.txt --rounds 3 runs/a.txt"
    assert origin["config"].items() >= {"document": "text.txt", "near": "runs/a.txt"}.items()
    assert "out" not in origin["config"]


@pytest.mark.parametrize(
    ("efficiency", "call", "regressed"),
    [
        (0.9, 1.2, []),
        (1.8, 0.6, []),  # twice as good in both
        (0.61, 2.39, []),  # 1.48 and 1.99 times worse
        (0.59, 1.2, ["efficiency"]),  # 1.53 times worse
        (0.9, 2.41, ["call"]),  # 2.01 times worse
    ],
)
def test_a_ratio_may_be_worse_by_its_factor(
    efficiency: float, call: float, regressed: list[str]
) -> None:
    findings = compare({"pools": {"efficiency": efficiency, "call": call}}, BEFORE)
    assert [f.name for f in findings if f.regressed] == regressed


def test_lines_say_by_how_much() -> None:
    better, worse = compare({"pools": {"efficiency": 0.45, "call": 0.6}}, BEFORE)
    assert better.line() == (
        "REGRESSION    pools: efficiency  0.45 (was 0.9, higher is better: 2.00x worse, "
        "allowed 1.5x)"
    )
    assert worse.line().startswith(
        "ok            pools: call  0.6 (was 1.2, lower is better: 0.50x"
    )


def test_what_was_not_measured_is_a_regression_of_a_full_run_alone() -> None:
    measured = {"pools": {"call": 1.2}}
    assert [f.line() for f in compare(measured, BEFORE) if f.regressed] == [
        "NOT MEASURED  pools: efficiency (was 0.9)"
    ]
    assert not any(f.regressed for f in compare(measured, BEFORE, quick=True))
    assert unknown({"pools": {"call": 1.0, "new": 2.0}}, BEFORE) == [("pools", "new")]


def test_an_update_takes_ratios_and_keeps_directions(tmp_path: Path) -> None:
    after = updated({"pools": {"call": 1.5}}, BEFORE)
    assert after["pools"] == {
        "efficiency": Expected(0.9, "higher", 1.5), "call": Expected(1.5, "lower", 2.0),
    }  # fmt: skip
    write_baseline(after, tmp_path / "b.json")
    assert read_baseline(tmp_path / "b.json") == after


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"pools": {"call": {"ratio": 1}}}',
             '{"pools": {"call": {"ratio": 0, "better": "lower", "within": 2}}}',
             '{"pools": {"call": {"ratio": 1, "better": "more", "within": 2}}}'],
)  # fmt: skip
def test_no_baseline(text: str, tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(DataError):
        read_baseline(path)


def test_the_checked_in_baseline_speaks_of_the_suite(tmp_path: Path) -> None:
    baseline = read_baseline()
    assert set(baseline) == set(SUITE)
    write_baseline(baseline, tmp_path / "b.json")
    assert (tmp_path / "b.json").read_text() == BASELINE.read_text()


@pytest.mark.parametrize(("share", "code"), [(1.0, 0), (0.4, 1)])
def test_the_exit_code_tells_a_regression(
    share: float,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The batched calls are as many times faster as they were, or less than half as many."""
    ((name, expected),) = read_baseline()["rsa_batching"].items()
    told = record(**{name: expected.ratio * share}) | {"benchmark": "rsa_batching"}
    (tmp_path / "rsa_batching.json").write_text(json.dumps(told))
    monkeypatch.setattr("sys.argv", ["record", "--compare", str(tmp_path), "--quick"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert ("REGRESSION" in capsys.readouterr().out) == bool(code)


def test_a_record_has_its_fields(tmp_path: Path) -> None:
    told = provenance("pools", {"seconds": 3.0, "out": tmp_path, "mesh": Path("meshes")})
    assert told["config"]["seconds"] == 3.0
    assert "out" not in told["config"]
    assert told["config"]["mesh"] == "meshes"
    assert told["config"]["torch"].startswith("2.")
    assert told["device"]["cores"] >= 1
    written = write(tmp_path / "deep" / "pools.json", told, {"call": 1.23456}, {"rows": [1]})
    assert read(tmp_path / "deep" / "pools.json") == written
    assert written["ratios"] == {"call": 1.2346}


@pytest.mark.parametrize("field", FIELDS)
def test_a_record_without_a_field_is_refused(field: str) -> None:
    whole = record(call=1.0)
    check(whole, "here")
    del whole[field]
    with pytest.raises(DataError, match=f"here: a record needs '{field}'"):
        check(whole, "here")


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("inf"), float("nan"), True])
def test_a_ratio_is_a_positive_number(ratio: float) -> None:
    with pytest.raises(DataError, match="must be a positive number"):
        check(record(call=ratio), "here")


def test_ratios_are_of_pairs() -> None:
    # The machine slowed down by ten in the third round: each pair has the same ratio.
    assert median_ratio([2.0, 4.0, 40.0], [1.0, 2.0, 20.0]) == 2.0


def test_the_fit_finds_cost_and_bandwidth() -> None:
    sizes = [1 << 10, 1 << 20, 1 << 28, 1 << 29]
    cost = fit(sizes, [0.002, 0.003, 0.002 + 0.25, 0.002 + 0.5])
    assert cost.operation_s == 0.002
    assert cost.bandwidth == pytest.approx((1 << 30), rel=1e-9)
    assert fit(sizes, [0.002, 0.003, 0.001, 0.001]).bandwidth > 1e14  # noise: no slope


def test_costs_leave_the_caches_out() -> None:
    """2 ms and 1 GB/s at both ends; in between a cache moves ten times as fast."""
    rows = []
    for size, speed in ((1 << 10, 1e9), (1 << 20, 1e10), (1 << 24, 1e10), (1 << 29, 1e9)):
        moved = 2.0 + 1e3 * size / speed
        rows.append(
            {"transport": "t", "bytes": size, "put": moved / 2, "get": moved / 2, "read": 0.0,
             "memcpy": 1e3 * size / 5e9}
        )  # fmt: skip
    cost = costs(rows)
    assert cost["t"].operation_s == pytest.approx(0.002, rel=1e-3)
    assert cost["t"].bandwidth == pytest.approx(1e9, rel=1e-3)
    assert cost["memcpy"].bandwidth == pytest.approx(5e9, rel=1e-3)


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
    assert "RuntimeError at tests/unit/benchmarks/test_record.py:" in rows[1].error
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
