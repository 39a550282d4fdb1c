"""The tables of the study "aggregation", from frontiers of two charts made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from rooms.kept_runs import HandmadeArchive

from studies import archive
from studies.tables import merging_arms, merging_differences, trained_to_aggregate

ACCURACY = {
    500: {"self_consistency": 0.5, "part_vote": 0.8, "best_of_n": 0.6, "rsa": 0.75},
    501: {"self_consistency": 0.3, "part_vote": 0.9, "best_of_n": 0.6, "rsa": 0.8},
}


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HandmadeArchive:
    monkeypatch.setattr(archive, "HOME", tmp_path)
    return HandmadeArchive("aggregation", "single answers")


def frontier(shares: dict[str, float], read: float = 0.0) -> dict[str, list[dict[str, object]]]:
    return {
        "arms": [
            {"strategy": name, "accuracy": share, "f1": share + 0.1, "tokens": 200.0,
             "prompt_tokens": read}
            for name, share in shares.items()
        ]
    }  # fmt: skip


@pytest.fixture
def merged(study: HandmadeArchive) -> None:
    for seed, shares in ACCURACY.items():
        study.add("merging", seed, {}, {}, frontier=frontier(shares, 500.0 + seed))
    study.pack()


@pytest.mark.usefixtures("merged")
def test_arms_are_means_over_charts() -> None:
    """75% and 80%: 77.5 -+ 12.706 * 2.5. 60% twice has no spread."""
    _, body = merging_arms("aggregation", "merging")
    rows = {row[0]: row[1:] for row in body}
    assert rows["aggregation"] == ["2", "77.5", "45.7 to 100.0", "0.875", "200", "1000"]
    assert rows["best of N by confidence"][1:3] == ["60.0", "60.0 to 60.0"]


@pytest.mark.usefixtures("merged")
def test_the_claim_is_decided_over_charts() -> None:
    """Over the vote 25 and 50 points: t is 3 at one degree of freedom, so p is
    1 - 2 atan(3) / pi = 0.205. Over the vote of parts -5 and -10, over the best of N 15 and 20."""
    _, body = merging_differences("aggregation", "merging")
    assert body == [
        ["vote over whole answers", "2", "+37.5", "-121.3 to +196.3", "0.205"],
        ["vote over each part", "2", "-7.5", "-39.3 to +24.3", ""],
        ["best of N by confidence", "2", "+17.5", "-14.3 to +49.3", ""],
    ]


def test_what_training_adds_to_aggregation_is_paired_by_chart(study: HandmadeArchive) -> None:
    """Aggregation adds 10 and 20 points after single answers, 20 and 40 after whole runs with own
    scores, 10 and 10 with the run's. Over the first 10 and 20: t is 3, so p is 0.205, twice it by
    Holm; 0 and -10: t is -1, so p is 0.5."""
    for arm, gains in (
        ("single answers", (0.1, 0.2)),
        ("whole runs, own scores", (0.2, 0.4)),
        ("whole runs, the run's reward", (0.1, 0.1)),
    ):
        for seed, gain in zip((400, 401), gains, strict=True):
            shares = frontier({"self_consistency": 0.5, "rsa": 0.5 + gain})
            study.add("training", seed, {"on_policy": arm}, {}, frontier=shares)
    study.pack()
    heads, body = trained_to_aggregate("aggregation", "training")
    assert heads[-3] == "over single answers, points"
    assert body == [
        ["single answers", "2", "50.0", "+15.0", "-48.5 to +78.5", "", "", ""],
        ["whole runs, own scores", "2", "50.0", "+30.0", "-97.1 to +157.1",
         "+15.0", "-48.5 to +78.5", "0.410"],
        ["whole runs, the run's reward", "2", "50.0", "+10.0", "+10.0 to +10.0",
         "-5.0", "-68.5 to +58.5", "0.500"],
    ]  # fmt: skip


@pytest.mark.usefixtures("study")
def test_without_an_archive_there_are_no_rows() -> None:
    assert merging_arms("aggregation", "merging")[1] == []
    assert merging_differences("aggregation", "merging")[1] == []
