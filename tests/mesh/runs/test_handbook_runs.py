"""meshes/handbook.yaml from the command line, whole: every arm, with turns that the handbook's
teacher verifies, and the evaluation of what else the model still does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from small_run import ROOT, run_to_end

from cartridge_forge.protocols.files import read_rows

pytestmark = [pytest.mark.timeout(900)]  # a busy machine starts it slowly

CODE = "import sys; from cartridge_forge.forge_run.cli import {0}; sys.exit({0}())"
RULES = ["all", "department", "note", "value", "finds_first", "full_stop", "one_sentence"]
SETS: dict[str, Any] = {
    "train.steps": 2, "train.warmup_steps": 1, "episodes.tasks": 3, "evaluate.questions": 3,
    "evaluate.probe_every": 0, "spares": 0,
    # Blocks of one rule: a wrong department is refused at once.
    "rollout.verify": {"rule": "threshold", "block": 6},
}  # fmt: skip
EVAL = {
    "questions": 2, "passages": 1, "passage_tokens": 16, "free_tokens": 4, "probes": 2,
    "resamples": 100, "max_tokens": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("handbook")
    mesh = str(ROOT / "meshes" / "handbook.yaml")
    words = [sys.executable, "-c", CODE.format("forge_run"), mesh, "--run-dir", str(root)]
    for key, value in SETS.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    process = run_to_end(words)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "Obedience by rule" in process.stdout
    return (root / "handbook" / "latest").resolve()


def test_every_arm_has_its_obedience_over_1_4_and_12_turns(run: Path) -> None:
    arms = json.loads((run / "results.json").read_text())["arms"]
    assert set(arms) == {"none", "document", "untrained", "offline", "on_policy"}
    for arm in arms.values():
        assert list(arm["rules"]) == RULES
        assert {turns: cell["n"] for turns, cell in arm["rules"]["all"].items()} == {
            "1": 1, "4": 1, "12": 1,
        }  # fmt: skip
        assert set(arm["rules"]["note"]) == {"4", "12"}  # it governs no task of one turn
        all_rules = [cell["obeyed"] for cell in arm["rules"]["all"].values()]
        assert arm["accuracy"] == pytest.approx(sum(all_rules) / 3)
    # The clerk obeys a handbook that it reads, over twelve turns too.
    assert arms["document"]["accuracy"] == 1.0
    assert arms["document"]["reward"] == 1.0
    assert arms["none"]["rules"]["department"]["12"]["obeyed"] == 0.0
    assert "<h2>Rules</h2>" in (run / "report.html").read_text()


def test_turns_are_the_students_or_the_teachers_and_both_are_named(run: Path) -> None:
    episodes, metrics = read_rows(run / "episodes.jsonl"), read_rows(run / "metrics.jsonl")
    verified = [row for row in episodes if row["arm"] == "on_policy"]
    assert {v for e in verified for t in e["turns"] for v in t["versions"]} == {0, 1}
    for row in (r for r in metrics if r["arm"] == "on_policy"):
        own = [e for e in verified if e["step"] == row["step"]]
        assert len(own) == row["episodes"]["count"] == 6
        taught = sum(len(t.get("taught", ())) for e in own for t in e["turns"])
        assert row["verified"]["taught"] == taught > 0
        assert row["sampler_gap"]["tokens"] == row["tokens"]
        assert set(RULES[1:]) <= {k.removeprefix("reward/") for k in row["episodes"]}
    offline = [row for row in episodes if row["arm"] == "offline"]
    assert {v for e in offline for t in e["turns"] for v in t["versions"]} == {-1}
    assert not any(t.get("taught") for e in offline for t in e["turns"])
    # Each case of a task is a conversation of its own.
    twelve = next(e for e in verified if len(e["turns"]) == 12)
    assert [t["branch"] for t in twelve["turns"]] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


def test_forge_eval_measures_what_else_is_kept(run: Path, tmp_path: Path) -> None:
    (tmp_path / "eval.yaml").write_text(json.dumps(EVAL))
    words = [sys.executable, "-c", CODE.format("forge"), "eval", str(run), "--spec"]
    process = run_to_end([*words, str(tmp_path / "eval.yaml"), "--out", str(tmp_path / "out")])
    assert process.returncode == 0, process.stdout + process.stderr
    told = json.loads((tmp_path / "out" / "eval.json").read_text())
    rows = {row["arm"]: row for row in told["rows"]}
    assert {"none", "document", "untrained", "offline", "on_policy"} <= set(rows)
    for name, row in rows.items():
        assert row["forgetting"]["n"] == 2
        assert (abs(row["forgetting"]["kl"]) > 1e-6) is (name != "none")
        assert 0.0 <= row["formats"]["obeyed"] <= 1.0
    assert rows["document"]["teacher"]["kl"] == pytest.approx(0.0, abs=1e-6)
