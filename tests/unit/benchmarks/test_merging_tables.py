"""The tables of the merging study, from frontiers of two charts made by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.results import records
from benchmarks.results.merging_tables import merging_arms, merging_differences
from benchmarks.results.sweeps import planned_trials
from protocols.files import REPOSITORY, json_lines

STUDY = "aggregation/study_merging"
ACCURACY = {
    500: {"self_consistency": 0.5, "part_vote": 0.8, "best_of_n": 0.6, "rsa": 0.75},
    501: {"self_consistency": 0.3, "part_vote": 0.9, "best_of_n": 0.6, "rsa": 0.8},
}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "HOME", tmp_path)
    monkeypatch.chdir(REPOSITORY)
    for record, trial in planned_trials(REPOSITORY / "configs" / f"{STUDY}.yaml"):
        if trial.seed not in ACCURACY:
            continue
        folder = tmp_path / record
        folder.mkdir(parents=True)
        (folder / "answers.jsonl.gz").write_bytes(gzip.compress(json_lines([{}]).encode()))
        arms = [
            {"strategy": name, "accuracy": share, "f1": share + 0.1, "tokens": 200.0,
             "prompt_tokens": 500.0 + trial.seed}
            for name, share in ACCURACY[trial.seed].items()
        ]  # fmt: skip
        (folder / "frontier.json").write_text(json.dumps({"arms": arms}))


@pytest.mark.usefixtures("kept")
def test_arms_are_means_over_charts() -> None:
    """75% and 80%: 77.5 -+ 12.706 * 2.5. 60% twice has no spread."""
    _, body = merging_arms(STUDY)
    rows = {row[0]: row[1:] for row in body}
    assert rows["aggregation"] == ["2", "77.5", "45.7 to 100.0", "0.875", "200", "1000"]
    assert rows["best of N by confidence"][1:3] == ["60.0", "60.0 to 60.0"]


@pytest.mark.usefixtures("kept")
def test_the_claim_is_decided_over_charts() -> None:
    """Over the vote 25 and 50 points: t is 3 at one degree of freedom, so p is
    1 - 2 atan(3) / pi = 0.205. Over the vote of parts -5 and -10, over the best of N 15 and 20."""
    _, body = merging_differences(STUDY)
    assert body == [
        ["vote over whole answers", "2", "+37.5", "-121.3 to +196.3", "0.205"],
        ["vote over each part", "2", "-7.5", "-39.3 to +24.3", ""],
        ["best of N by confidence", "2", "+17.5", "-14.3 to +49.3", ""],
    ]


def test_without_records_there_are_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "HOME", tmp_path)
    assert merging_arms(STUDY)[1] == merging_differences(STUDY)[1] == []
