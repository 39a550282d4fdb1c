"""Test the tables of articles and of merging, and rescored answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rooms.kept_runs import HandmadeArchive

from studies import archive
from studies.accuracy.rescored import rescore
from studies.tables.cells import decided
from studies.tables.recorded import (
    article_arms,
    article_comparisons,
    article_outcomes,
    merging_arms,
    merging_differences,
    trained_to_aggregate,
)

ANSWERS = {  # seed, arm -> the losses by article
    (0, "on_policy"): {"a": (3.0, 5.0), "b": (5.0, 5.0)},
    (1, "on_policy"): {"a": (2.0, 2.0), "b": (5.0, 5.0)},
    (0, "offline"): {"a": (2.0, 2.0), "b": (2.0, 2.0)},
    (1, "offline"): {"a": (2.0, 2.0), "b": (1.0, 3.0)},
}
AFTER_OWN = {"on_policy": {"a": 1.0, "b": 1.0}, "offline": {"a": 2.0, "b": 3.0}}  # of seed 1


def _answer(arm: str, article: str, nll: float, right: float | None) -> dict[str, Any]:
    return {"arm": arm, "document": article, "nll": nll, "right": right, "sampled": False}


def spec(init: str) -> dict[str, Any]:
    return {"learn": {"cartridge": {"init": init}}}


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HandmadeArchive]:
    monkeypatch.setattr(archive, "HOME", tmp_path)
    article_outcomes.cache_clear()
    yield HandmadeArchive("real")
    article_outcomes.cache_clear()


@pytest.fixture
def kept(study: HandmadeArchive) -> None:
    """Keep two seeds of 128 tokens; only the second was evaluated after its run."""
    for seed in (0, 1):
        answers = [
            _answer(arm, article, loss, 0.0)
            for arm in ("on_policy", "offline")
            for article, losses in ANSWERS[seed, arm].items()
            for loss in losses
        ]
        answers.append(_answer("on_policy", "a", 100.0, None))  # a prompt of training's kind
        steps = [{"arm": "on_policy", "tokens": 10}, {"arm": "on_policy", "tokens": 20}]
        results: dict[str, Any] = {"phases": {"step": 4.0}}
        whole: dict[str, Any] = {}
        if seed == 1:  # written since the seconds of every arm are kept
            steps.append({"arm": "offline", "tokens": 30})
            results["step_seconds"] = {"on_policy": 4.0, "offline": 7.0}
            rows = [
                {
                    "kind": kind,
                    "passages": {"value": math.exp(1.5), "tokens": 48},
                    "after_own": {"nll": {f"{a}/passage/0": loss for a, loss in losses.items()}},
                }
                for kind, losses in AFTER_OWN.items()
            ]
            whole = {"eval": {"rows": rows}}
        study.add(
            "sweep", seed, {"on_policy": "128: on policy", "offline": "128: offline"},
            {"answers": answers, "metrics": steps}, results=results, spec=spec("first_tokens"),
            **whole,
        )  # fmt: skip
    study.pack()


@pytest.mark.usefixtures("kept")
def test_an_articles_value_is_its_mean_over_seeds() -> None:
    """On policy 3 and 5: 4 -+ 12.706 * 1, in two steps of 4 s. Offline 2 and 2, in a step of 7 s
    of the seed that kept it."""
    _, body = article_arms("real", "sweep")
    assert body == [
        ["128: on policy", "2", "30", "8", "4.00", "-8.71 to 16.71", "1.50", "1.00",
         "1.00 to 1.00"],
        ["128: offline", "2", "15", "7", "2.00", "2.00 to 2.00", "1.50", "2.50", "-3.85 to 8.85"],
    ]  # fmt: skip


@pytest.mark.usefixtures("kept")
def test_arms_are_compared_article_by_article() -> None:
    """Answers differ by 1 and 3: t is 2 at one degree of freedom, p 0.295. After own words by -1
    and -2: t is 3, p 0.205. By Holm the smaller doubles and the other is at least that."""
    _, body = article_comparisons("real", "sweep", "primary")
    arms = ["128: on policy", "128: offline"]
    assert body == [
        [*arms, "answers", "2", "+2.00", "-10.71 to +14.71", "0.410", "open"],
        [*arms, "after own words", "2", "-1.50", "-7.85 to +4.85", "0.410", "open"],
    ]
    assert article_comparisons("real", "sweep", "secondary")[1] == []


def test_another_sweeps_arms_are_read_beside_its_own(study: HandmadeArchive) -> None:
    """Attention matching is 2 and 1 in a sweep that registered the answers alone; the first tokens
    are 3 and 4 in the sweep before it: -1 and -3, as above with the other sign."""
    for sweep, arm, losses in (
        ("starts", "32: attention matching", {"a": 2.0, "b": 1.0}),
        ("sweep", "32: first tokens", {"a": 3.0, "b": 4.0}),
    ):
        answers = [_answer("untrained", a, loss, 0.0) for a, loss in losses.items()]
        study.add(
            sweep, 0, {"untrained": arm}, {"answers": answers, "metrics": []},
            results={"phases": {}}, spec=spec("first_tokens"),
        )  # fmt: skip
    study.pack()
    assert article_comparisons("real", "starts", "secondary")[1] == [
        ["32: attention matching", "32: first tokens", "answers", "2", "-2.00", "-14.71 to +10.71",
         "0.295", "open"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([0.9, 1.0, 1.1], "worse"),
        ([-0.9, -1.0, -1.1], "better"),
        ([0.01, -0.01, 0.0], "no difference that matters"),
        ([0.5, -0.5, 0.0], "open"),
        ([0.5], "open"),
    ],
)
def test_the_interval_decides(differences: list[float], expected: str) -> None:
    assert decided(differences) == expected


ACCURACY = {
    500: {"self_consistency": 0.5, "part_vote": 0.8, "best_of_n": 0.6, "rsa": 0.75},
    501: {"self_consistency": 0.3, "part_vote": 0.9, "best_of_n": 0.6, "rsa": 0.8},
}


@pytest.fixture
def merging_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HandmadeArchive:
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
def merged(merging_study: HandmadeArchive) -> None:
    for seed, shares in ACCURACY.items():
        merging_study.add("merging", seed, {}, {}, frontier=frontier(shares, 500.0 + seed))
    merging_study.pack()


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


def test_what_training_adds_to_aggregation_is_paired_by_chart(
    merging_study: HandmadeArchive,
) -> None:
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
            merging_study.add("training", seed, {"on_policy": arm}, {}, frontier=shares)
    merging_study.pack()
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


def row(answer: str | None, expected: str | None, right: float | None = 1.0) -> dict[str, Any]:
    return {"answer": answer, "expected": expected, "right": right}


def test_scores_that_differ_are_counted() -> None:
    rows = [
        row("1990\u20131995", "1990-1995"),  # exact and F1
        row("in 1990\u20131995", "1990-1995"),  # F1
        row("nine days", "nine"),
        row(None, "nine"),
        row("nine", None),
        row("nine", "nine", None),
    ]
    assert rescore(rows) == {"answers": 3, "exact": 1, "f1": 2}
