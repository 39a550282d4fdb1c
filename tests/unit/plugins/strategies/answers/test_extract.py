"""Where answers stand in responses, and which of them are one."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.strategies.answers.equivalence import end_judge, need_judge
from cartridge_forge.plugins.strategies.answers.extract import (
    FORMS,
    Form,
    clusters,
    extract,
    same_answer,
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
