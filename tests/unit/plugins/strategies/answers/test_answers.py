"""Test how answers are extracted, compared, voted on and declined."""

import asyncio
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.data.metrics.squad_metrics import compute_f1, normalize_answer

from cartridge_forge.plugins.strategies.answers.declines import declines
from cartridge_forge.plugins.strategies.answers.equivalence import end_judge, need_judge
from cartridge_forge.plugins.strategies.answers.extract import (
    FORMS,
    Form,
    clusters,
    extract,
    plain_answer,
    same_answer,
)
from cartridge_forge.plugins.strategies.answers.squad import (
    exact_match,
    f1,
    normalised,
    squad_scores,
)
from cartridge_forge.plugins.strategies.answers.votes import surest, tally
from cartridge_forge.plugins.strategies.deepconf import (
    group_confidences,
    token_confidences,
    trace_confidence,
)
from cartridge_forge.protocols.errors import DataError, RunError


@pytest.mark.parametrize(
    ("form", "text", "answer"),
    [
        ("math", r"so \boxed{4} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("math", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("math", r"\boxed{}", None),
        ("math", r"\boxed{12", None),
        ("math", "12", None),
        ("rg", "<answer>1</answer> no: <answer>\n2 </answer>", "2"),
        ("rg", "<answer>1 <answer>2</answer>", "2"),
        ("rg", "<answer></answer>", None),
        ("rg", "<answer>3", None),
        ("supergpqa", r"\boxed{C}", "C"),
        ("supergpqa", r"\boxed{\text{(j)}}", "J"),
        ("supergpqa", r"\boxed{B. mitosis}", "B"),
        ("supergpqa", r"\boxed{mitosis}", None),
        ("supergpqa", "B", None),
        ("clinic", "the answer is 41.5 Gram daily. that is all.", "41.5 gram daily"),
        ("clinic", "the answer is a fracture.", "a fracture"),
        ("clinic", "answer: (B) 41 gram", "b"),
        ("clinic", "the answer is c.", "c"),
        ("clinic", "the answer is 3. no, the answer is 4.", "4"),
        ("clinic", "the answer is", None),
        ("clinic", "four", None),
        ("general", "2 + 2\nThe answer is: 4\nbye", "4"),
        ("general", "Answer:\n 4", "4"),
        ("general", "Answer: 4\nAnswer:", None),
        ("general", "  four \n", "four"),
        ("general", " \n", None),
    ],
)
def test_extract(form: Form, text: str, answer: str | None) -> None:
    assert extract(text, form) == answer


def test_an_unknown_form_is_named() -> None:
    with pytest.raises(DataError, match=r"'maths'.*math, rg"):
        extract("", "maths")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("form", "a", "b", "equal"),
    [
        ("math", "0.5", r"\dfrac{1}{2}", True),
        ("math", "1/2", r"\frac12", True),
        ("math", "-1/2", "-.50", True),
        ("math", "1,000", "1000.", True),
        ("math", "0.333", r"\frac{1}{3}", False),
        ("math", "1,00", "100", False),
        ("math", r"\left( 1, 2 \right)", "(1,2)", True),
        ("math", r"\$18", "18", True),
        ("math", "18.00", r"\mathbf{18}", True),
        ("math", "18.00", r"\text{18 dollars}", True),
        ("math", "US$18", "18 USD", True),
        ("math", r"-\$18", "-18", True),
        ("math", "18 dollars", "20 dollars", False),
        ("math", "18 percent", "0.18", True),
        ("math", "3:4", "0.75", True),
        ("math", r"[1,2)\cup(3,4]", r"(3,4]\cup[1,2)", True),
        ("math", r"(0.5,3)\cup(4,5)", r"(4,5)\cup(\frac12,3)", True),
        ("math", r"(1,2)\cup(3,4)", r"(1,2)\cup(3,5)", False),
        ("math", "(-\u221e,0.5)", r"(-\infty,\frac12)", True),
        ("math", r"(-\infty,2)", r"(-\infty,2]", False),
        ("math", r"\infty", r"-\infty", False),
        ("math", "3,5", r"\{5,3\}", True),
        ("math", r"3 \text{ or } 5", "5, 3", True),
        ("math", "3,5", "(3,5)", False),  # or (3,5) and (5,3) were equal by way of it
        ("math", r"\pi r^2", r"r^2 \pi", True),
        ("math", "$18$", r"\$ 18.00", True),
        ("math", "6.674e-11", r"6.674\times10^{-11}", True),
        ("math", "6.674E-11", r"6.674 \cdot 10^{-11}", True),
        ("math", "6.674e-11", "1.381e-23", False),
        ("math", r"1.381\times 10^{-23}", r"6.626 \times 10^{-34}", False),
        ("math", "6.674e-11", "6.675e-11", False),
        ("math", "1.3806490e-23", "1.3806491e-23", True),  # six significant digits
        ("math", "10^{-3}", "0.001", True),
        ("math", "1e-40", "0", False),
        ("math", "1e3", "1000", True),
        ("math", "0.333333", r"\frac{1}{3}", True),
        ("math", "12345678901", "12345678902", False),
        ("math", "12345678.5", "12345678.6", False),
        ("math", r"50\%", "0.5", True),
        ("math", "50%", "50", False),
        ("math", "1{,}000", "1000", True),
        ("math", "\u22125", "-5", True),
        ("math", "2 1/3", r"2\frac{1}{3}", True),
        ("math", "2 1/3", "7", False),
        ("math", r"\{1, 0.5\}", r"\{\frac12, 1\}", True),
        ("math", "(1, 0.5)", r"(\frac12, 1)", False),
        ("math", "(1e-11, 2)", "(2e-11, 2)", False),
        ("math", "12", "21", False),
        ("rg", "A b", "a b", False),
        ("supergpqa", "A", "A", True),
        ("clinic", "41 Gram", "41  gram", True),
        ("general", '"Four".', "four", True),
    ],
)
def test_same(form: Form, a: str, b: str, equal: bool) -> None:
    assert same_answer(a, b, form) is same_answer(b, a, form) is equal


@pytest.mark.parametrize(
    ("form", "answer", "plain"),
    [
        ("math", "28,080", "28080"),
        ("math", r"\$1{,}234.50", "1234.5"),
        ("math", r"-2.5\times10^{3}", "-2500"),
        ("math", "1e-7", "0.0000001"),
        ("math", "50%", "0.5"),
        ("math", "-0.0", "0"),
        ("math", "3 apples", "3apples"),
        ("math", r"\frac{2}{4}", r"\frac{2}{4}"),  # simplifying it may be what is asked
        ("math", "4 + 3 - 2", "4+3-2"),  # and so may adding
        ("math", "9" * 5000, "9" * 5000),
        ("rg", " 28,080", " 28,080"),
        ("general", '"Paris. "', "Paris"),
        ("clinic", "41  mmol.", "41 mmol"),
    ],
)
def test_plain_answers(form: Form, answer: str, plain: str) -> None:
    assert plain_answer(answer, form) == plain
    assert same_answer(answer, plain, form)


def test_the_longest_number_of_an_exponent_is_exact() -> None:
    digits = "7" * 290
    assert plain_answer(f"{digits}e999", "math") == digits + "0" * 999
    assert plain_answer(f"0.{digits}e-999", "math") == "0." + "0" * 999 + digits


def test_a_vote_of_numbers_too_long_for_an_int_is_counted() -> None:
    answers = ["9" * 5000, "7", "9" * 5000]
    assert [v.traces for v in asyncio.run(tally(answers, "math"))] == [(0, 2), (1,)]


def test_a_judge_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    end_judge()
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RunError, match=r"math_judge:judge did not start.*make install"):
        same_answer(r"\sqrt{20}", r"2\sqrt{5}", "math")


def test_answers_that_need_no_judge() -> None:
    assert not need_judge(["1/2", "0.5", r"\frac{3}{4}"])
    assert not need_judge([r"\sqrt 2", r"\sqrt2", r" \sqrt 2."])
    assert need_judge([r"\sqrt 2", "1.4"])


PIECES = [
    "\\boxed{",
    "}",
    "{",
    "answer is",
    "answer:",
    "<answer>",
    "</answer>",
    "4",
    "B",
    ".",
    "\n",
    " ",
]


@given(
    text=st.lists(st.sampled_from(PIECES), max_size=12).map("".join), form=st.sampled_from(FORMS)
)
def test_any_text_has_an_answer_or_none(text: str, form: Form) -> None:
    answer = extract(text, form)
    assert answer is None or answer == answer.strip() != ""
    assert answer is None or same_answer(answer, answer, form)


@given(st.lists(st.sampled_from(["1/2", "0.5", ".50", "2", "2.0", "3", None]), max_size=9))
def test_clusters_part_the_answers(answers: list[str | None]) -> None:
    found = clusters(answers, "math")
    there = [i for i, a in enumerate(answers) if a is not None]
    assert sorted(i for members in found for i in members) == there
    assert [m[0] for m in found] == sorted(m[0] for m in found)
    for members in found:
        assert members == sorted(members)
        assert len({Fraction(answers[i] or 0) for i in members}) == 1
    assert len(found) == len({Fraction(a) for a in answers if a is not None})


NUMBERS = [
    "0.5",
    r"50\%",
    "50",
    "1/2",
    r"\$50",
    "5e1",
    "5e-11",
    r"5\times10^{-11}",
    "7e-23",
    "0",
    "2",
]


@given(st.permutations([*NUMBERS, *NUMBERS[:3]]))
def test_clusters_do_not_depend_on_the_order(answers: list[str]) -> None:
    found = {frozenset(answers[i] for i in members) for members in clusters(answers, "math")}
    assert found == {
        frozenset(group)
        for group in (
            ["0.5", r"50\%", "1/2"], ["50", r"\$50", "5e1"], ["5e-11", r"5\times10^{-11}"],
            ["7e-23"], ["0"], ["2"],
        )
    }  # fmt: skip


@given(*(st.sampled_from(NUMBERS) for _ in range(3)))
def test_equality_of_numbers_is_an_equivalence(a: str, b: str, c: str) -> None:
    assert same_answer(a, a, "math")
    assert same_answer(a, b, "math") == same_answer(b, a, "math")
    assert same_answer(a, c, "math") or not (
        same_answer(a, b, "math") and same_answer(b, c, "math")
    )


def test_clusters_in_order_of_appearance() -> None:
    assert clusters(["1/2", None, "3", "0.5", "3.0"], "math") == [[0, 3], [2, 4]]
    assert clusters([None, None], "rg") == []


def test_missing_answers_never_vote_and_ties_go_to_the_earliest() -> None:
    answers = [None, "3", "1/2", None, "0.5", "3.0", None]
    votes = asyncio.run(tally(answers, "math"))
    assert [(v.answer, v.weight, v.traces) for v in votes] == [
        ("3", 2.0, (1, 5)),
        ("1/2", 2.0, (2, 4)),
    ]
    assert asyncio.run(tally([None, None], "math")) == []


def test_weights_decide_over_numbers() -> None:
    votes = asyncio.run(tally(["a", "b", "a"], "rg", [1.0, 2.5, 1.0]))
    assert [(v.answer, v.weight) for v in votes] == [("b", 2.5), ("a", 2.0)]


@pytest.mark.parametrize(
    ("confidences", "fraction", "kept"),
    [
        ([1.0, 3.0, 2.0, 2.5], 0.5, [1, 3]),
        ([1.0, 3.0, 2.0], 0.5, [1, 2]),  # 1.5 traces are 2
        ([1.0, 1.0, 1.0], 0.1, [0]),  # of equals the earliest, and at least one
        ([1.0, 2.0], 1.0, [0, 1]),
        (list(range(10)), 0.7, [3, 4, 5, 6, 7, 8, 9]),
        ([], 0.5, []),
    ],
)
def test_surest(confidences: list[float], fraction: float, kept: list[int]) -> None:
    assert surest(confidences, fraction) == kept


def test_confidence_of_a_token_is_minus_the_mean_of_its_top_k() -> None:
    places = [(("a", -0.5), ("b", -1.5), ("c", -4.0)), (("a", -1.0),)]
    assert token_confidences(places, 3) == [2.0, 1.0]
    assert token_confidences(places, 2) == [1.0, 1.0]


def test_confidence_of_groups_and_traces() -> None:
    said = [4.0, 2.0, 0.0, 4.0, 6.0, 8.0]
    assert group_confidences(said, 2) == [3.0, 1.0, 2.0, 5.0, 7.0]
    assert group_confidences(said, 7) == [4.0]
    assert group_confidences([], 7) == []
    assert trace_confidence(said, "mean", 2) == 4.0
    assert trace_confidence(said, "tail", 2) == 7.0
    assert trace_confidence(said, "tail", 9) == 4.0
    assert trace_confidence(said, "lowest_group", 2) == 1.0
    assert trace_confidence(said, "lowest_tenth", 2) == 1.0  # of five groups: one
    assert trace_confidence([], "lowest_group", 2) == 0.0
    # Twenty groups of one: the lowest two.
    assert trace_confidence([float(c) for c in range(20)], "lowest_tenth", 1) == 0.5


FILES = Path("tests/data/declines")


def read(name: str) -> list[tuple[bool, str, str]]:
    """Return (declines, question, response) of each line."""
    found = []
    for line in (FILES / name).read_text().splitlines():
        question, response = line[2:].split(" | ", 1)
        found.append((line[0] == "+", question, response))
    return found


def test_at_least_57_of_the_60_apart_from_tuning() -> None:
    lines = read("test.txt")
    assert [sum(want for want, _, _ in lines), len(lines)] == [30, 60]
    assert not set(lines) & set(read("tuning.txt"))
    right = [declines(response, question) == want for want, question, response in lines]
    assert sum(right) >= 57


@pytest.mark.parametrize(("want", "question", "response"), read("tuning.txt"))
def test_responses_of_tuning(want: bool, question: str, response: str) -> None:
    assert declines(response, question) is want


@pytest.mark.parametrize(
    ("response", "want"),
    [
        ("", True),
        (" … ", True),
        ("—", True),
        ("+", False),
        ("A", False),
        ("It doesn\u2019t say.", True),
        ("IT DOES NOT SAY", True),
        ("It doesn\u02bct say", True),
        ("**Not stated**", True),
        ("\u201cUnknown\u201d", True),
        ("Unknown\u2014the text doesn\u2019t say", True),
        ("It doesn't say: 42", False),
    ],
)
def test_signs(response: str, want: bool) -> None:
    assert declines(response) is want


def test_a_question_of_yes_or_no_is_answered_by_a_negation() -> None:
    asked = "Is parking included?"
    for response in (
        "No",
        "No.",
        "It is not included.",
        "No, it isn't.",
        "Parking isn't included.",
    ):
        assert not declines(response, asked), response
    for response in ("It isn't mentioned.", "The text does not say whether parking is included."):
        assert declines(response, asked), response


def test_a_long_response_is_read_in_time() -> None:
    # Patterns over a clause of thousands of words would take minutes.
    assert not declines("the text does not say no information is given in it " * 400)


def test_normalisation_by_hand() -> None:
    assert normalised("The  Nine, days!") == "nine days"
    assert f1("nine days", "nine days in June") == pytest.approx(2 * 2 / (2 + 4))
    assert f1("nine nine", "nine") == pytest.approx(2 * 1 / 3)
    assert f1("", "nine") == 0.0
    assert squad_scores("about nine dry days", ("9", "nine days")) == (0.0, pytest.approx(4 / 6))


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("Dr Okafor", "\u201cDr Okafor\u201d"),
        ("Dr Okafor", "\u00abDr Okafor\u00bb"),
        ("Dr Okafor", "Dr\u00a0Okafor"),
        ("St. John's", "St. John\u2019s"),
        ("St. John's", "St. John\u02bcs"),
        ("1990-1995", "1990\u20131995"),
        ("1990-1995", "1990\u22121995"),
        ("1990-1995", "1990\u20111995"),
        ("Yes", "Yes\u2026"),
        ("caf\u00e9", "cafe\u0301"),
        ("5 km", "\uff15 \uff4b\uff4d"),
        ("\u65e5\u672c", "\u300c\u65e5\u672c\u300d\u3002"),
        ("stra\u00dfe", "STRASSE"),
        ("zero", "ze\u00adro\u200b"),
        ("90\u00b0", "90"),
        ("\u20ac20", "20 \u20ac"),
    ],
)
def test_signs_of_unicode(answer: str, response: str) -> None:
    assert squad_scores(response, (answer,)) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("answer", "response", "exact", "score"),
    [
        ("A", "A", 1.0, 1.0),
        ("A", "a.", 1.0, 1.0),
        ("A", "\u201cA\u201d", 1.0, 1.0),
        ("A", "The blood group is A.", 0.0, 2 * 1 / (5 + 1)),
        ("A", "B", 0.0, 0.0),
        ("A", "A+", 0.0, 0.0),
        ("A+", "A-", 0.0, 0.0),
        ("A-", "A\u2212", 1.0, 1.0),
        ("+", "+", 1.0, 1.0),
        ("+", "-", 0.0, 0.0),
        ("-", "\u2013", 1.0, 1.0),
        ("+", "rhesus +", 0.0, 2 * 1 / (2 + 1)),
        ("The", "the", 1.0, 1.0),
        ("A", "", 0.0, 0.0),
        ("+", "The chart does not say.", 0.0, 0.0),
        ("A", "There is no information about a blood group.", 0.0, 0.0),
        ("A", "N/A", 0.0, 0.0),
    ],
)
def test_answers_of_which_normalisation_leaves_nothing(
    answer: str, response: str, exact: float, score: float
) -> None:
    assert exact_match(response, answer) == exact
    assert f1(response, answer) == pytest.approx(score)


ASCII = st.text(st.characters(max_codepoint=126, min_codepoint=32), max_size=40)


@given(a=ASCII, b=ASCII)
def test_ascii_is_scored_as_by_squads_own_script(a: str, b: str) -> None:
    assert normalised(a) == normalize_answer(a)
    if normalised(b):
        assert f1(a, b) == pytest.approx(compute_f1(b, a))
