"""`forge eval` of a whole run, from the command line to the report."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from small_run import Finished, run_to_end

SPEC = "questions: 8\npassages: 1\npassage_tokens: 12\nprobes: 2\nresamples: 200\n"
CODE = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"


def test_every_arm_sits_the_same_exam(finished: Finished, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished.path, run)  # the run's own tests count its files
    (tmp_path / "eval.yaml").write_text(SPEC)
    words = [sys.executable, "-c", CODE, "eval", str(run), "--spec", str(tmp_path / "eval.yaml")]
    process = run_to_end(words, timeout=600.0)
    assert process.returncode == 0, process.stdout + process.stderr
    told = json.loads((run / "eval.json").read_text())
    rows = {row["arm"]: row for row in told["rows"]}
    assert list(rows) == ["none", "document", "truncated", "untrained", "offline", "on_policy"]
    # The run measured its arms on these very questions.
    results = json.loads((run / "results.json").read_text())
    for arm, result in results["arms"].items():
        row = rows[arm]
        assert (row["n"], row["accuracy"]) == (result["n"], result["accuracy"]), arm
        assert row["parse_failures"] == result["parse_failures"]
    for arm in ("offline", "on_policy"):
        assert rows[arm]["trained_tokens"] == results["tokens_trained"][arm]
        assert rows[arm]["compression"] == pytest.approx(results["compression"]["ratio"])
    assert rows["document"]["teacher"]["kl"] == pytest.approx(0.0, abs=1e-4)
    assert told["contamination"]["exact"] == 0
    assert told["contamination"]["prompts"] > 0
    assert len(told["pairs"]) == 6 * 5 // 2
    assert len((run / "eval_answers.jsonl").read_text().splitlines()) == 6 * (2 * 8 + 2 * 2)
    assert "## what the arms do by themselves" in (run / "eval.md").read_text()
    assert "differences in accuracy, paired bootstrap over 2 documents" in process.stdout
    assert "| on_policy | 28 | 8." in (run / "eval.md").read_text()
    for name in ("eval.html", "report.html"):
        assert "accuracy against compression" in (run / name).read_text()
    assert (run / "eval-training.svg").read_text().startswith("<svg ")
