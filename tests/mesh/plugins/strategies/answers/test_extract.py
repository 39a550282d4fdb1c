"""Where answers stand in responses, and which of them are one."""

import threading

import pytest

from cartridge_forge.plugins.strategies.answers.extract import clusters, same_answer


# These need math-verify: one process, about a second to start.
@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (r"\sqrt{8}", r"2\sqrt 2", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("x=3", "3", True),
        (r"50\%", r"\frac{\sqrt{1}}{2}", True),
        (r"\sqrt{2}", "1.414214", True),
        (r"\sqrt{2}", "1.41422", False),
        (r"\frac{\sqrt{2}}{10^{20}}", "1.41421e-20", True),
        (r"\frac{\sqrt{2}}{10^{20}}", r"\frac{\sqrt{3}}{10^{20}}", False),
        (r"\{0.5,\sqrt{2}\}", r"\{1.414214,\frac12\}", True),
        ("x=3", "y = 3.0", True),
        ("2^{10}", "1024", True),
        (r"3\text{ cm}", "3", True),
        ("(2,1)", "(3,2)", False),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("(1,2)", "(2,1)", False),
        ("[0,1]", "[0,1)", False),
        (r"\infty", r"-\infty", False),
        (r"\frac{1}{0}", "3", False),
        (r"\frac{", "3", False),
    ],
)
def test_same_by_math_verify(a: str, b: str, equal: bool) -> None:
    assert same_answer(a, b, "math") is same_answer(b, a, "math") is equal


def test_what_never_ends_ends_outside_the_main_thread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = "7^{9^{9^{9}}}"
    found: list[bool] = []

    def ask() -> None:
        found.append(same_answer(tower, "2", "math"))
        found.append(same_answer(tower, r"\sqrt{3}", "math"))  # known by now: no second wait
        found.append(same_answer(tower, tower, "math"))

    with monkeypatch.context() as patched:
        patched.setattr("cartridge_forge.plugins.strategies.answers.equivalence.SECONDS", 0.3)
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(60)
    assert found == [False, False, True]
    # The judge that the tower ended has a successor.
    assert same_answer(r"\sqrt{12}", r"2\sqrt 3", "math")


def test_clusters_of_expressions_do_not_depend_on_the_order() -> None:
    answers = [r"\sqrt{2}", "1.414214", "1.4142136", "x=3", "3", "y=3", "(x+1)^2", "x^2+2x+1"]
    for order in (answers, answers[::-1], answers[4:] + answers[:4]):
        found = {frozenset(order[i] for i in members) for members in clusters(order, "math")}
        assert found == {frozenset(answers[:3]), frozenset(answers[3:6]), frozenset(answers[6:])}
