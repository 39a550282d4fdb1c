"""The tables of the merging study, from frontiers of two charts made by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.results import records
from benchmarks.results.merging_tables import (
    merging_arms,
    merging_differences,
    trained_to_aggregate,
)
from benchmarks.results.sweeps import planned_trials
from protocols.files import REPOSITORY, json_lines

STUDY = "aggregation/study_merging"
ACCURACY = {
    500: {"self_consistency": 0.5, "part_vote": 0.8, "best_of_n": 0.6, "rsa": 0.75},
    501: {"self_consistency": 0.3, "part_vote": 0.9, "best_of_n": 0.6, "rsa": 0.8},
}


def keep(home: Path, record: str, arms: dict[str, float], read: float = 0.0) -> None:
    folder = home / record
    folder.mkdir(parents=True)
    (folder / "answers.jsonl.gz").write_bytes(gzip.compress(json_lines([{}]).encode()))
    rows = [
        {"strategy": name, "accuracy": share, "f1": share + 0.1, "tokens": 200.0,
         "prompt_tokens": read}
        for name, share in arms.items()
    ]  # fmt: skip
    (folder / "frontier.json").write_text(json.dumps({"arms": rows}))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "HOME", tmp_path)
    monkeypatch.chdir(REPOSITORY)
    for record, trial in planned_trials(REPOSITORY / "configs" / f"{STUDY}.yaml"):
        if trial.seed in ACCURACY:
            keep(tmp_path, record, ACCURACY[trial.seed], 500.0 + trial.seed)


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


def test_what_training_adds_to_aggregation_is_paired_by_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aggregation adds 10 and 20 points after single answers, 20 and 40 after whole runs with own
    scores, 10 and 10 with the run's. Over the first 10 and 20: t is 3, so p is 0.205, twice it by
    Holm; 0 and -10: t is -1, so p is 0.5."""
    monkeypatch.setattr(records, "HOME", tmp_path)
    study = "aggregation/study_training"
    adds = {"single answers": (0.1, 0.2), "whole runs, own scores": (0.2, 0.4)}
    for record, trial in planned_trials(REPOSITORY / "configs" / f"{study}.yaml"):
        if trial.seed in (400, 401):
            added = adds.get(dict(trial.arms)["on_policy"], (0.1, 0.1))[trial.seed - 400]
            keep(tmp_path, record, {"self_consistency": 0.5, "rsa": 0.5 + added})
    heads, body = trained_to_aggregate(study)
    assert heads[-3] == "over single answers, points"
    assert body == [
        ["single answers", "2", "50.0", "+15.0", "-48.5 to +78.5", "", "", ""],
        ["whole runs, own scores", "2", "50.0", "+30.0", "-97.1 to +157.1",
         "+15.0", "-48.5 to +78.5", "0.410"],
        ["whole runs, the run's reward", "2", "50.0", "+10.0", "+10.0 to +10.0",
         "-5.0", "-68.5 to +58.5", "0.500"],
    ]  # fmt: skip


def test_without_records_there_are_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "HOME", tmp_path)
    assert merging_arms(STUDY)[1] == merging_differences(STUDY)[1] == []
