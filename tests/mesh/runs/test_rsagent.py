"""meshes/rsagent.yaml from the command line, cut down. (tests/nightly/runs/resumed kills one.)"""

from __future__ import annotations

import json
from pathlib import Path

from rooms.training.rsa_runs import CANDIDATES

from cartridge_forge.plugins.episodes.environments.episode_files import from_row
from cartridge_forge.protocols.files import read_rows


def test_a_run_trains_every_candidate_of_every_run_and_reports_its_populations(calm: Path) -> None:
    rows = read_rows(calm / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        told = row["episodes"]
        assert (told["count"], told["errored"], told["rsa/runs"]) == (4 * CANDIDATES, 0, 4)
        assert all(0 <= told[f"rsa/accuracy_{t}"] <= 1 for t in range(4))
        assert row["channels"]["grpo"]["count"] == row["tokens"]
        assert row["kl"] is None
    assert any(row["tokens"] for row in rows)  # where rewards varied within a problem
    episodes = [from_row(row) for row in read_rows(calm / "episodes.jsonl")]
    assert len(episodes) == 4 * 4 * CANDIDATES
    for step, part in enumerate([episodes[i : i + 64] for i in range(0, 256, 64)]):
        assert {v for e in part for t in e.turns for v in t.versions} == {step}  # on policy
        assert len({e.group for e in part}) == 2
    results = json.loads((calm / "results.json").read_text())
    before, after = (results["arms"][arm]["populations"] for arm in ("untrained", "on_policy"))
    gain = results["aggregation"]
    assert gain["last"] == after["accuracy"][-1] - before["accuracy"][-1]
    assert gain["first"] == after["accuracy"][0] - before["accuracy"][0]
    assert gain["aggregation"] == gain["last"] - gain["first"]
    report = (calm / "report.html").read_text()
    assert "<h2>Aggregation</h2>" in report
    assert "Training moved the last population by" in report
