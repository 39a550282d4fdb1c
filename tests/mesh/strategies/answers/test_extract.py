"""Where answers stand in responses, and which of them are one."""

import threading

import pytest

from strategies.answers.extract import same


# These need math-verify: one process, about a second to start.
@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (r"\sqrt{8}", r"2\sqrt 2", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("x=3", "3", True),
        (r"50\%", "0.5", True),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("(1,2)", "(2,1)", False),
        ("[0,1]", "[0,1)", False),
        (r"\infty", r"-\infty", False),
        (r"\frac{1}{0}", "3", False),
        (r"\frac{", "3", False),
    ],
)
def test_same_by_math_verify(a: str, b: str, equal: bool) -> None:
    assert same(a, b, "math") is same(b, a, "math") is equal


def test_what_never_ends_ends_outside_the_main_thread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = "7^{9^{9^{9}}}"
    found: list[bool] = []

    def ask() -> None:
        found.append(same(tower, "2", "math"))
        found.append(same(tower, r"\sqrt{3}", "math"))  # known by now: no second wait
        found.append(same(tower, tower, "math"))

    with monkeypatch.context() as patched:
        patched.setattr("strategies.answers.equivalence.SECONDS", 0.3)
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(60)
    assert found == [False, False, True]
    # The judge that the tower ended has a successor.
    assert same(r"\sqrt{12}", r"2\sqrt 3", "math")
