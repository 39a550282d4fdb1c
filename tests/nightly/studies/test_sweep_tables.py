"""Tables over desks and sets of charts, from records made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rooms.kept_runs import HandmadeArchive

from studies import archive
from studies.tables.curricula import curriculum_arms, curriculum_differences
from studies.tables.recorded import between, collapses, over_reference, seeds, shared_facts


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "HOME", tmp_path)


def answered(document: str, fact: str, expected: str, said: str, arm: str = "on_policy") -> Any:
    text = f"the chart says {fact} {said}. the answer is {said}."
    return {
        "arm": arm, "sampled": False, "fact": fact, "document": document, "expected": expected,
        "text": text, "right": float(said == expected),
    }  # fmt: skip


def test_answers_are_counted_by_the_charts_that_have_one() -> None:
    """Sodium is in two charts, where b gets a's value; both charts of the ward say the same."""
    answers = [
        answered("a", "sodium", "41", "41"), answered("b", "sodium", "52", "41"),
        answered("a", "ward", "east", "east"), answered("b", "ward", "east", "west"),
        answered("a", "surgeon", "weber", "weber"), answered("a", "surgeon", "weber", "xu"),
        answered("a", "surgeon", "weber", "xu", arm="none"),
    ]  # fmt: skip
    for name in ("one", "two"):
        study = HandmadeArchive(name)
        study.add("run", 0, {}, {"answers": answers})
        study.pack()
    heads, body = shared_facts("one,two", "run/0")
    assert heads[3:] == ["one: right", "one: another chart's", "two: right", "two: another chart's"]
    alone, shared = body
    assert alone[:3] == ["1", "2", "100.0%"]
    assert alone[4] == "0.0%"
    assert shared[:3] == ["2", "4", "50.0%"]
    assert shared[3].startswith("50.0% (")
    assert shared[4] == "25.0%"


def test_seeds_stand_side_by_side_with_their_interval() -> None:
    """0.5 and 1.0 would have 0.75 -+ 12.706 * 0.35355 / sqrt(2)."""
    right = [answered("a", "sodium", "41 mmol", "41 mmol")]
    wrong = [answered("a", "sodium", "41 mmol", "40 mmol")]
    study = HandmadeArchive("corpus")
    for arm, seed, answers in (
        ("own fields", 400, right + wrong), ("own fields", 401, right), ("whole", 400, wrong),
    ):  # fmt: skip
        study.add("sweep", seed, {"on_policy": f"{arm}: on policy"}, {"answers": answers})
    study.pack()
    assert seeds("corpus", "sweep") == (
        ["", "400", "401", "mean", "95% interval"],
        [
            ["own fields: on policy", "50.0%", "100.0%", "75.0%", "0.0% to 100.0%"],
            ["whole: on policy", "0.0%", "", "0.0%", ""],
        ],
    )


def test_arms_of_a_sweep_are_paired_with_the_reference_by_desk() -> None:
    """GRPO 0.25 and 0.5, with hints 0.75 and 1: 50 points each, so the interval has no width. Of
    means 37.5 and 87.5 it is -+ 12.706 * 17.678 / sqrt(2) = 158.8, cut to 0 to 100. The first
    rewards are 0.1, the last five's mean 0.3 and, once, 0.06. With replay 0.5 and 0.5: over hints
    -25 and -50 points, -37.5 -+ 12.706 * 17.678 / sqrt(2). Differences are cut to
    -100 to 100. Of two desks with all right the interval begins at 0.025 ** (1 / 2)."""

    def desks(*, replay: bool) -> None:
        study = HandmadeArchive("channels", "GRPO")

        def add(seed: int, arms: dict[str, str], right: dict[str, float], last: float) -> None:
            answers = [
                {"arm": arm, "sampled": False, "right": float(i < 4 * share)}
                for arm, share in right.items()
                for i in range(4)
            ]
            rewards = (0.1, *[last] * 5)
            steps = [{"arm": "on_policy", "episodes": {"reward": r}} for r in rewards]
            study.add("desk", seed, arms, {"answers": answers, "metrics": steps})

        ends = {"document": "document", "untrained": "untrained", "on_policy": "GRPO"}
        for seed, share, last in ((100, 0.25, 0.3), (101, 0.5, 0.06)):
            add(seed, ends, {"document": 1.0, "untrained": 0.25, "on_policy": share}, last)
        for seed, share in ((100, 0.75), (101, 1.0)):
            add(seed, {"on_policy": "GRPO + SDPO"}, {"on_policy": share}, 0.3)
        for seed in (100, 101) if replay else ():
            add(seed, {"on_policy": "GRPO + replay"}, {"on_policy": 0.5}, 0.3)
        study.pack()

    desks(replay=True)
    assert between("channels", "desk")[1] == [
        ["GRPO + replay over GRPO + SDPO", "-37.5", "-100.0 to +100.0"]
    ]
    desks(replay=False)
    assert between("channels", "desk")[1] == []
    heads, body = over_reference("channels", "desk")
    assert heads == [
        "arm", "units", "right, %", "95% interval", "over GRPO, points", "95% interval",
    ]  # fmt: skip
    assert body == [
        ["document", "2", "100.0", "15.8 to 100.0", "+62.5", "-96.3 to +100.0"],
        ["untrained", "2", "25.0", "25.0 to 25.0", "-12.5", "-100.0 to +100.0"],
        ["GRPO", "2", "37.5", "0.0 to 100.0", "", ""],
        ["GRPO + SDPO", "2", "87.5", "0.0 to 100.0", "+50.0", "+50.0 to +50.0"],
    ]
    assert collapses("channels", "desk")[1] == [
        ["GRPO", "+12.5", "-0.04"],
        ["GRPO + SDPO", "+62.5", "+0.20"],
    ]


def test_curricula_are_compared_clinic_by_clinic() -> None:
    """Sampled answers: +0.25 and +0.5, 37.5 -+ 12.706 * 17.678 / sqrt(2) points, cut to 100 either
    way, and t = 3. Greedy ones: +0.25 and -0.25. Losses -0.1 and -0.3: t = -2. Processor seconds
    halve; those of the clock stay and double: sqrt(2), and logs of 0.347 -+ 4.404, which is
    12.706 * 0.490 / sqrt(2)."""
    study = HandmadeArchive("longhealth", "plain")

    def add(
        seed: int, arm: str, sampled: float, greedy: float, nll: float, cpu: float, wall: float
    ) -> None:
        answers = [
            {"arm": "on_policy", "right": float(i < 4 * greedy), "nll": nll} for i in range(4)
        ]
        evaluated = {"rows": [{"free_running": {"accuracy": sampled}}]}
        steps = [{"arm": "on_policy", "tokens": 10}, {"arm": "on_policy", "tokens": 30}]
        results = {"cpu": {"all": cpu}, "wall_seconds": wall}
        files = {"answers": answers, "metrics": steps}
        study.add("curriculum", seed, {"on_policy": arm}, files, results=results, eval=evaluated)

    for seed, *plain in ((0, 0.25, 0.5, 0.2, 100.0, 50.0), (1, 0.5, 0.75, 0.4, 100.0, 50.0)):
        add(seed, "plain", *plain)
    for seed, *verified in ((0, 0.5, 0.75, 0.1, 50.0, 50.0), (1, 1.0, 0.5, 0.1, 50.0, 100.0)):
        add(seed, "verified", *verified)
    study.pack()
    assert curriculum_arms("longhealth", "curriculum")[1][1] == [
        "verified", "2", "2", "40", "75.0% (0.0 to 100.0)", "62.5% (0.0 to 100.0)", "0.100", "50",
    ]  # fmt: skip
    assert [row[1:] for row in curriculum_differences("longhealth", "curriculum")[1]] == [
        ["sampled answers right, points", "+37.5", "-100.0 to +100.0", "0.205"],
        ["greedy answers right, points", "+0.0", "-100.0 to +100.0", "1.000"],
        ["loss of the right answer, nats", "-0.200", "-1.471 to +1.071", "0.295"],
        ["processor seconds, ratio", "x 0.50", "0.50 to 0.50", ""],
        ["seconds, ratio", "x 1.41", "0.02 to 115.61", ""],
    ]
