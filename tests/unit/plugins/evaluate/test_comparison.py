"""Test comparisons of arms, their own text and calibration."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from evaluation_setup import spec

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.plugins.evaluate.calibration import MachineRates, measure_rates
from cartridge_forge.plugins.evaluate.compare import (
    AnswerSource,
    cells,
    compare_groups,
    grouped,
    remarks,
)
from cartridge_forge.plugins.evaluate.own_text import (
    FORMATS,
    FormatPrompt,
    WrittenText,
    is_in,
    summary,
    whole_sentences,
)
from cartridge_forge.plugins.evaluate.risk_coverage import fallback_recovery, risk_coverage
from cartridge_forge.plugins.spec_files.yaml_source import dump_yaml
from cartridge_forge.plugins.statistics.intervals import SHARE_DIFFERENCE, mean_interval
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.files import json_lines
from cartridge_forge.protocols.records.answers import Answer, AnswerRow, to_row

TINY = Answer(
    id="0", fact="f0", document="d", document_hash="00", question_hash="q", tokens=3,
    text="x", answer="x", expected="x",
)  # fmt: skip


def rows(
    arm: str,
    right: Sequence[float],
    *,
    document: str = "d",
    hash: str = "00",
    nll: Sequence[float] | None = None,
    sampled: bool = False,
) -> list[AnswerRow]:
    """One question a fact."""
    found = []
    for i, value in enumerate(right):
        answer = replace(
            TINY, id=str(i), fact=f"f{i}", document=document, document_hash=hash, right=value,
            nll=None if nll is None else nll[i],
        )  # fmt: skip
        found.append(to_row(answer, arm, 5, sampled=sampled))
    return found


def test_the_loss_is_that_of_right_answers_where_there_are_any() -> None:
    """Held-out prompts of self-study, which no answer is right for, have a loss too: 9 and 1."""
    asked = [
        row
        for arm, own, prompt in (("offline", 2.0, 9.0), ("on_policy", 1.0, 1.0))
        for row in (
            *rows(arm, [0.0, 1.0], nll=[own, own]),
            *(r | {"right": None} for r in rows(arm, [0.0, 0.0], hash="01", nll=[prompt] * 2)),
        )
    ]
    (group,) = grouped([AnswerSource("r", asked)], sampled=False)
    (found,) = compare_groups([group], metrics=["nll"])
    assert (found.n, found.of_a, found.of_b, found.difference) == (2, 2, 2, -1.0)
    alone = [row for row in asked if row["right"] is None]
    (group,) = grouped([AnswerSource("r", alone)], sampled=False)
    (found,) = compare_groups([group], metrics=["nll"])
    assert (found.n, found.difference) == (2, -8.0)


def test_differences_of_two_arms_by_hand() -> None:
    a, b = [0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 1.0]
    source = AnswerSource(
        "r", [*rows("offline", a, nll=[2.0] * 4), *rows("on_policy", b, nll=[1.0, 2.0, 0.0, 1.0])]
    )
    (group,) = grouped([source], sampled=False)
    right, nll = compare_groups([group])
    assert (right.metric, right.a, right.b, right.n) == ("right", "offline", "on_policy", 4)
    assert (right.mean_a, right.mean_b, right.difference) == (0.25, 0.75, 0.5)
    assert (right.documents, right.resampled, right.units) == (1, "facts", 4)
    # Over its facts alone the bootstrap is that of four independent values: Student's interval.
    student = mean_interval([1.0, 0.0, 0.0, 1.0], SHARE_DIFFERENCE)
    assert right.ci95 == pytest.approx(student, abs=0.05)
    assert nll.difference == pytest.approx(-1.0)
    low, high = sorted([right.p, nll.p])
    assert sorted([right.p_holm, nll.p_holm]) == pytest.approx(
        sorted([2 * low, max(2 * low, high)])
    )
    assert remarks([right])[0].startswith("one document: the intervals speak of this document")


def test_the_interval_of_shares_ends_where_they_do() -> None:
    """Of three facts two are right in one arm alone: Student's is +66.7, -76.8 to +210.1 points."""
    a, b = [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]
    answers = [*rows("none", a, nll=[9.0, 1.0, 1.0]), *rows("on_policy", b, nll=[1.0] * 3)]
    right, nll = compare_groups(grouped([AnswerSource("r", answers)], sampled=False))
    assert right.ci95 == (pytest.approx(-0.77, abs=0.05), 1.0)
    assert cells(right)[7:9] == ("+66.7", f"{100 * right.ci95[0]:+.1f} to +100.0")
    # A difference of losses has no bound: -8/3 -+ 4.303 * 8/3 nats.
    assert nll.ci95 == pytest.approx((-14.14, 8.81), abs=0.5)
    # All three: at least 0.025^(1/3) of all facts, and the p-value of three equal signs.
    every = [*rows("none", a), *rows("on_policy", [1.0] * 3)]
    (right,) = compare_groups(grouped([AnswerSource("r", every)], sampled=False))
    assert right.ci95 == pytest.approx((-0.41520, 1.0), abs=1e-5)
    assert right.p == pytest.approx(0.25)


def test_arms_are_paired_by_question_and_not_by_order() -> None:
    b = rows("on_policy", [1.0, 0.0, 1.0])
    source = AnswerSource("r", [*rows("offline", [1.0, 0.0, 0.0, 1.0]), *reversed(b)])
    (one,) = compare_groups(grouped([source], sampled=False))
    assert (one.n, one.of_a, one.of_b) == (3, 4, 3)
    assert one.difference == pytest.approx(1 / 3)
    assert any("left out" in line for line in remarks([one]))


def test_runs_of_one_setting_over_other_documents_are_pooled() -> None:
    """Of two settings over three documents each: two groups, one comparison, three units."""
    sources = []
    for name, p, gain in (("a", 8, 0.0), ("b", 16, 1.0)):
        for number in range(3):
            values = [gain, 0.0, gain if number else 0.0, 0.0]
            own = rows("on_policy", values, hash=f"0{number}")  # the same name in every run
            untrained = rows("untrained", [0.0] * 4, hash=f"0{number}")
            sources.append(
                AnswerSource(f"{name}{number}", [*own, *untrained], {"cartridge.tokens": p})
            )
    groups = grouped(sources, sampled=False)
    assert [g.names for g in groups] == [["a0", "a1", "a2"], ["b0", "b1", "b2"]]
    (one,) = compare_groups(groups)  # untrained arms of runs over one data set are equal
    assert (one.a, one.b) == ("on_policy of a0+a1+a2", "on_policy of b0+b1+b2")
    assert (one.n, one.documents, one.resampled, one.units) == (12, 3, "documents", 3)
    assert one.difference == pytest.approx((1 + 2 + 2) / 12)
    assert remarks([one])[0] == "3 documents: so few tell little of others"
    assert len(compare_groups(groups, arms=["untrained", "on_policy"])) == 2


def test_runs_of_one_setting_over_the_same_questions_are_compared() -> None:
    """Such as two seeds of training: they are no further questions."""
    sources = [AnswerSource(n, rows("on_policy", [1.0, 0.0, float(n == "b")])) for n in "ab"]
    (one,) = compare_groups(grouped(sources, sampled=False))
    assert (one.a, one.b, one.n) == ("on_policy of a", "on_policy of b", 3)


def test_sampled_answers_are_taken_on_request_or_where_there_are_no_others() -> None:
    both = [*rows("none", [0.0, 0.0]), *rows("none", [1.0, 1.0], sampled=True)]
    alone = rows("on_policy", [1.0, 0.0], sampled=True)
    means = []
    for sampled in (False, True):
        (one,) = compare_groups(grouped([AnswerSource("r", [*both, *alone])], sampled=sampled))
        means.append((one.mean_a, one.mean_b))
    assert means == [(0.0, 0.5), (1.0, 0.5)]


def test_what_cannot_be_compared_is_refused() -> None:
    one = AnswerSource("a", rows("on_policy", [1.0, 0.0]), {"train.lr": 1})
    other = AnswerSource("b", rows("on_policy", [1.0, 0.0], hash="01"), {"train.lr": 2})
    with pytest.raises(DataError, match="on_policy of a and on_policy of b answered different"):
        compare_groups(grouped([one, other], sampled=False))
    with pytest.raises(DataError, match="nothing to compare"):
        compare_groups(grouped([one], sampled=False))
    with pytest.raises(DataError, match="an arm sgd; --arm is of on_policy"):
        compare_groups(grouped([one], sampled=False), arms=["sgd"])
    single = [*rows("offline", [1.0]), *rows("on_policy", [0.0])]
    with pytest.raises(DataError, match="one fact only"):
        compare_groups(grouped([AnswerSource("a", single)], sampled=False))


def test_the_command_prints_a_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [*rows("offline", [0.0, 1.0, 0.0]), *rows("on_policy", [1.0, 1.0, 1.0])]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "answers.jsonl").write_text(json_lines(both))
    packed = tmp_path / "kept.jsonl.gz"
    with gzip.open(packed, "wt") as file:
        file.write(json_lines(both))
    told = []
    for path in (tmp_path / "run", packed):
        assert forge(["compare", str(path), "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0]["comparisons"] == told[1]["comparisons"]
    (one,) = told[0]["comparisons"]
    assert one["difference"] == pytest.approx(2 / 3)
    assert told[0]["notes"][0].startswith("one document")
    assert forge(["compare", str(packed), "--arm", "offline", "--arm", "on_policy"]) == 0
    shown = capsys.readouterr().out
    assert "+66.7" in shown
    assert "this document alone" in shown
    assert forge(["compare", str(tmp_path)]) == 2
    assert "has no answers.jsonl" in capsys.readouterr().err
    assert forge(["compare", str(packed), "--arm", "none"]) == 2


def test_runs_are_pooled_over_data_and_seeds_but_not_over_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = {
        "a1": ("data.seed=1", "train.seed=1"),
        "a2": ("data.seed=2", "train.seed=2", "evaluate.arms=[on_policy]"),
        "b1": ("data.seed=1", "train.lr=0.1"),
        "b2": ("data.seed=2", "train.lr=0.1"),
    }
    for name, own in sets.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "spec.yaml").write_text(dump_yaml(spec(*own).as_dict()))
        values = rows("on_policy", [1.0, 0.0, float(name[0] == "b")], hash=f"0{name[1]}")
        (tmp_path / name / "answers.jsonl").write_text(json_lines(values))
    assert forge(["compare", *(str(tmp_path / name) for name in sets), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [g["runs"] for g in told["groups"]] == [["a1", "a2"], ["b1", "b2"]]
    assert [g["settings"] for g in told["groups"]] == [{"train.lr": 0.4}, {"train.lr": 0.1}]
    (one,) = told["comparisons"]
    assert (one["n"], one["documents"]) == (6, 2)
    assert one["difference"] == pytest.approx(1 / 3)


DOCUMENT = "The sodium is 41 mmol. The patient, who is 63, was seen on Monday. All is well."


def written(
    text: str, own: list[float], teacher: list[float], *, sampled: bool = True, ended: bool = True
) -> WrittenText:
    """A text of tokens with these probabilities; a token is the teacher's likeliest above 1/2."""
    return WrittenText(
        text=text, document=DOCUMENT, logprobs=tuple(map(math.log, own)),
        teacher_logprobs=tuple(map(math.log, teacher)), matches=tuple(p > 0.5 for p in teacher),
        ended=ended, sampled=sampled,
    )  # fmt: skip


def test_measures_of_sampled_texts_are_those_worked_by_hand() -> None:
    first = written("The sodium is 41 mmol. The sodium is 40 mmol.", [0.5, 0.8], [0.25, 0.9])
    second = written("all is well", [0.4, 0.5, 0.5, 0.5], [0.8, 0.04, 0.5, 0.25], ended=False)
    one = summary([first, second])
    # min(1, T/S): 1/2, 1, then 1, 0.08, 1, 1/2.
    assert one["accepted"] == pytest.approx((0.5 + 1 + 1 + 0.08 + 1 + 0.5) / 6)
    kl = [
        math.log(s / t)
        for s, t in ((0.5, 0.25), (0.8, 0.9), (0.4, 0.8), (0.5, 0.04), (1, 1), (2, 1))
    ]
    assert one["kl"] == pytest.approx(sum(kl) / 6)
    assert one["teacher_nll"] == pytest.approx(-math.log(0.25 * 0.9 * 0.8 * 0.04 * 0.5 * 0.25) / 6)
    assert one["until_refused"] == (2 + 1) / 6  # the second text's second token has 0.04
    assert (one["tokens"], one["sentences"]) == (6, 2)  # the second text was cut in its only one
    assert one["precision"] == 0.5


def test_of_greedy_texts_the_teachers_likeliest_tokens_count() -> None:
    one = summary(
        [written("All is well.", [0.9, 0.9, 0.9, 0.9], [0.9, 0.6, 0.4, 0.3], sampled=False)]
    )
    assert (one["accepted"], one["kl"], one["precision"]) == (0.5, None, 1.0)
    assert one["until_refused"] == 1.0


def test_a_sentence_is_whole_and_stands_in_the_document_word_by_word() -> None:
    text = "One is here. Two is cut"
    assert whole_sentences(text, False, DOCUMENT) == ["One is here."]
    assert whole_sentences(text, True, DOCUMENT) == ["One is here.", "Two is cut"]
    assert whole_sentences("...", True, DOCUMENT) == []
    lower = "sodium 4.5 mmol. glucose 7 mmol. all"
    assert whole_sentences(lower, False, DOCUMENT) == []
    assert whole_sentences(lower, False, "a is b. c is d.") == [
        "sodium 4.5 mmol.",
        "glucose 7 mmol.",
    ]
    assert is_in("the patient who is 63 WAS seen on Monday.", DOCUMENT)
    assert not is_in("The sodium is 4", DOCUMENT)  # 41 is another word
    assert not is_in("The patient was seen on Monday.", DOCUMENT)
    assert is_in("肺部没有异常。", "今天检查。肺部没有异常。心脏正常。")


OBEYS = {
    "one_word": (["Blue.", "red"], ["", "It is blue."]),
    "yes_or_no": (["Yes", "no."], ["Yes, it is.", ""]),
    "five_words": (["Deep, wide, blue water."], ["The sea is deep, wide and blue.", " "]),
    "bullets": (["- apple\n- pear\n- fig"], ["- apple\n- pear", "Fruits:\n- a\n- b\n- c"]),
    "numbered": (["1. It helps.\n2) It is fun."], ["1. It helps. 2. It is fun.", "2. a\n1. b"]),
    "upper": (["HELLO, MY FRIEND!"], ["Hello", "!!"]),
    "json": (['{"city": "Paris", "country": "France"}'], ['{"city": "Paris"}', "[1]", "Paris"]),
    "ends_with": (["Good night under the moon."], ["The moon says good night."]),
    "begins_with": (["Water falls."], ["It is water.", ""]),
    "integers": (["1, 2, 3, 4"], ["1 2 3 4", "1, 2, 3", "1, 2, 3, 4 are the numbers"]),
    "quoted": (['"Haste makes waste."'], ['He said "haste".', '"', ""]),
    "two_lines": (["Snow falls\n\nall day"], ["Snow falls all day", "a\nb\nc"]),
}


@pytest.mark.parametrize("prompt", FORMATS, ids=lambda prompt: prompt.id)
def test_a_form_is_obeyed_or_not(prompt: FormatPrompt) -> None:
    good, bad = OBEYS[prompt.id]
    assert all(map(prompt.obeys, good))
    assert not any(map(prompt.obeys, bad))


READER = Path(__file__).parents[4] / "models" / "clinic-reader"


def test_rates_are_tokens_over_seconds() -> None:
    """The trial reads 32 tokens in a second, so a part of 2 s reads 64; a third of 2 s of 64 trains
    42; four rows write six tokens each. Every one takes a second here."""
    ticks = count()
    found = measure_rates(load_model(str(READER)), 4, 8, clock=lambda: float(next(ticks)))
    assert found == MachineRates(forward=64.0, backward=42.0, decode=24.0)
    assert next(ticks) == 8  # four measurements, two readings each


def test_a_slow_machine_is_measured_by_few_tokens() -> None:
    ticks = count(step=1000)
    found = measure_rates(load_model(str(READER)), 1, 8, clock=lambda: float(next(ticks)))
    assert found == MachineRates(forward=0.032, backward=0.032, decode=0.006)


def test_risk_is_the_mean_loss_of_the_most_confident() -> None:
    curve = risk_coverage([0.9, 0.5, 0.7, 0.2], [0.0, 1.0, 1.0, 1.0])
    assert curve.coverages == (0.25, 0.5, 0.75, 1.0)
    assert curve.risks == pytest.approx((0.0, 1 / 2, 2 / 3, 3 / 4))
    assert curve.area == pytest.approx((0 + 1 / 2 + 2 / 3 + 3 / 4) / 4)


def test_answers_of_one_confidence_come_together() -> None:
    one = risk_coverage([0.9, 0.5, 0.5], [0.0, 1.0, 0.0])
    assert one == risk_coverage([0.5, 0.9, 0.5], [0.0, 0.0, 1.0])
    assert one.coverages == pytest.approx((1 / 3, 1.0))
    assert one.risks == pytest.approx((0.0, 1 / 3))
    assert one.area == pytest.approx(2 / 9)  # 0 over a third, 1/3 over two thirds
    with pytest.raises(ValueError, match="no answer"):
        risk_coverage([], [])


def test_a_fallback_is_measured_by_an_oracle_of_the_same_share() -> None:
    losses, others = [1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.5, 0.0]  # gains 1, -1, 0.5, 0
    # The oracle takes the first and the third: 1.5. By confidence the second and third: -0.5.
    assert fallback_recovery([0.9, 0.1, 0.2, 0.8], losses, others, 0.5) == pytest.approx(-1 / 3)
    assert fallback_recovery([0.1, 0.9, 0.2, 0.8], losses, others, 0.5) == 1.0
    assert fallback_recovery([0.2, 0.9, 0.1, 0.8], losses, others, 0.25) == 0.5
    assert fallback_recovery([0.1, 0.2], [0.0, 1.0], [0.0, 1.0], 0.5) is None
    with pytest.raises(ValueError, match=r"from 0 to 1: got 1\.5"):
        fallback_recovery([0.1], [1.0], [0.0], 1.5)
