"""The tables of the study of real articles, from records of two articles made by hand."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import records
from benchmarks.results.real_study import NO_MODEL, decided, real_arms, real_primary, real_secondary
from benchmarks.results.sweeps import planned_trials
from protocols.files import REPOSITORY, json_lines

STUDY = "sweep_real"
ANSWERS = {  # seed, arm -> the losses by article
    (0, "on_policy"): {"a": (3.0, 5.0), "b": (5.0, 5.0)},
    (1, "on_policy"): {"a": (2.0, 2.0), "b": (5.0, 5.0)},
    (0, "offline"): {"a": (2.0, 2.0), "b": (2.0, 2.0)},
    (1, "offline"): {"a": (2.0, 2.0), "b": (1.0, 3.0)},
}
AFTER_OWN = {"on_policy": {"a": 1.0, "b": 1.0}, "offline": {"a": 2.0, "b": 3.0}}  # of seed 1


def _answer(arm: str, article: str, nll: float, right: float | None) -> dict[str, Any]:
    return {"arm": arm, "document": article, "nll": nll, "right": right, "sampled": False}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep two seeds of 128 tokens; only the second was evaluated after its run."""
    monkeypatch.setattr(records, "HOME", tmp_path)
    for record, trial in planned_trials(REPOSITORY / "configs" / f"{STUDY}.yaml", NO_MODEL):
        if dict(trial.arms).get("offline") != "128: offline" or trial.seed > 1:
            continue
        folder = tmp_path / record
        folder.mkdir(parents=True)
        answers = [
            _answer(arm, article, loss, 0.0)
            for arm in ("on_policy", "offline")
            for article, losses in ANSWERS[trial.seed, arm].items()
            for loss in losses
        ]
        held_out = _answer("on_policy", "a", 100.0, None)  # a prompt of training's kind
        answers_text = json_lines([*answers, held_out]).encode()
        (folder / "answers.jsonl.gz").write_bytes(gzip.compress(answers_text))
        steps = [{"arm": "on_policy", "tokens": 10}, {"arm": "on_policy", "tokens": 20}]
        if trial.seed == 1:
            steps.append({"arm": "offline", "tokens": 30})
        (folder / "metrics.jsonl.gz").write_bytes(gzip.compress(json_lines(steps).encode()))
        results: dict[str, Any] = {"phases": {"step": 4.0}}
        if trial.seed == 1:  # written since the seconds of every arm are kept
            results["step_seconds"] = {"on_policy": 4.0, "offline": 7.0}
        (folder / "results.json").write_text(json.dumps(results))
        if trial.seed == 1:
            rows = [
                {
                    "kind": kind,
                    "passages": {"value": math.exp(1.5), "tokens": 48},
                    "after_own": {"nll": {f"{a}/passage/0": loss for a, loss in losses.items()}},
                }
                for kind, losses in AFTER_OWN.items()
            ]
            (folder / "eval.json").write_text(json.dumps({"rows": rows}))


@pytest.mark.usefixtures("kept")
def test_an_articles_value_is_its_mean_over_seeds() -> None:
    """On policy 3 and 5: 4 -+ 12.706 * 1, in two steps of 4 s. Offline 2 and 2, in a step of 7 s
    of the seed that kept it."""
    _, body = real_arms(STUDY)
    assert body == [
        [
            "128: on policy",
            "2",
            "30",
            "8",
            "4.00",
            "-8.71 to 16.71",
            "1.50",
            "1.00",
            "1.00 to 1.00",
        ],
        ["128: offline", "2", "15", "7", "2.00", "2.00 to 2.00", "1.50", "2.50", "-3.85 to 8.85"],
    ]


@pytest.mark.usefixtures("kept")
def test_arms_are_compared_article_by_article() -> None:
    """Answers differ by 1 and 3: t is 2 at one degree of freedom, p 0.295. After own words by -1
    and -2: t is 3, p 0.205. By Holm the smaller doubles and the other is at least that."""
    _, body = real_primary(STUDY)
    arms = ["128: on policy", "128: offline"]
    assert body == [
        [*arms, "answers", "2", "+2.00", "-10.71 to +14.71", "0.410", "open"],
        [*arms, "after own words", "2", "-1.50", "-7.85 to +4.85", "0.410", "open"],
    ]
    assert real_secondary(STUDY)[1] == []


def test_another_studys_arms_are_read_beside_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention matching is 2 and 1 in a study that registered the answers alone; the first tokens
    are 3 and 4 in the study before it: -1 and -3, as above with the other sign."""
    monkeypatch.setattr(records, "HOME", tmp_path)
    for study, arm, losses in (
        ("real/sweep_starts", "32: attention matching", {"a": 2.0, "b": 1.0}),
        (STUDY, "32: first tokens", {"a": 3.0, "b": 4.0}),
    ):
        planned = planned_trials(REPOSITORY / "configs" / f"{study}.yaml", NO_MODEL)
        record = next(r for r, t in planned if dict(t.arms).get("untrained") == arm)
        folder = tmp_path / record
        folder.mkdir(parents=True)
        answers = [_answer("untrained", a, loss, 0.0) for a, loss in losses.items()]
        (folder / "answers.jsonl.gz").write_bytes(gzip.compress(json_lines(answers).encode()))
        (folder / "metrics.jsonl.gz").write_bytes(gzip.compress(b""))
        (folder / "results.json").write_text(json.dumps({"phases": {}}))
    assert real_secondary("real/sweep_starts")[1] == [
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
