"""Test intervals, and the losses of right answers."""

import math
import random
from collections import Counter
from itertools import product
from math import sqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.statistics.gold import gold_results, side_by_side
from cartridge_forge.plugins.statistics.intervals import (
    AT_LEAST_ZERO,
    SHARE,
    SHARE_DIFFERENCE,
    ClusterResamples,
    Difference,
    holm,
    mean_interval,
    mean_p,
    paired_difference,
    resamples,
    student_t95,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "n", "lo", "hi"),
    [
        # k = 0: (0, z^2 / (n + z^2)) = 3.8416 / 13.8416
        (0, 10, 0.0, 0.27754),
        # k = n mirrors it
        (10, 10, 0.72246, 1.0),
        # the middle: 0.5 -+ z sqrt(2.5 + z^2/4) / (n + z^2) = 0.5 -+ 1.96 * 1.86022 / 13.8416
        (5, 10, 0.23659, 0.76341),
        # (1 + z^2/2) / 5.8416... of two: 0.5 -+ 1.96 * sqrt(0.5 + 0.9604) / 5.8416
        (1, 2, 0.09453, 0.90547),
        # 90% of 200: (180 + 1.9208) / 203.8416 -+ 1.96 * sqrt(18 + 0.9604) / 203.8416
        (180, 200, 0.85059, 0.93433),
    ],
)
def test_hand_worked_values(successes: int, n: int, lo: float, hi: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((lo, hi), abs=2e-5)


def test_the_ends_are_exact() -> None:
    assert wilson_interval(0, 7)[0] == 0.0
    assert wilson_interval(7, 7)[1] == 1.0


def test_nothing_measured_is_nothing_known() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("successes", "n"), [(-1, 3), (4, 3), (0, -1)])
def test_impossible_counts_are_refused(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match=rf"successes must lie in 0\.\.n: got {successes} of n"):
        wilson_interval(successes, n)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_it_holds_the_share_and_mirrors(counts: tuple[int, int]) -> None:
    k, n = counts
    lo, hi = wilson_interval(k, n)
    assert 0 <= lo <= k / n <= hi <= 1
    assert wilson_interval(n - k, n) == pytest.approx((1 - hi, 1 - lo), abs=1e-12)


@pytest.mark.parametrize(
    ("values", "lo", "hi"),
    [
        # two: one degree of freedom, 1 -+ 12.706 * sqrt(2) / sqrt(2)
        ([0.0, 2.0], -11.7062, 13.7062),
        # three: 2 -+ 4.3027 * 1 / sqrt(3)
        ([1.0, 2.0, 3.0], -0.48414, 4.48414),
        # five, deviation sqrt(2.5): 3 -+ 2.7764 * sqrt(0.5)
        ([5.0, 1.0, 4.0, 2.0, 3.0], 1.03676, 4.96324),
        ([0.7, 0.7, 0.7], 0.7, 0.7),
        # "Student", Biometrika 6 (1908), page 20: hours of sleep gained of ten patients, 1.58 with
        # a deviation of 1.2300: 1.58 -+ 2.2622 * 1.2300 / sqrt(10)
        ([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4], 0.70011, 2.45989),
    ],
)
def test_a_mean_over_a_few_values(values: list[float], lo: float, hi: float) -> None:
    assert mean_interval(values) == pytest.approx((lo, hi), abs=1e-4)


@pytest.mark.parametrize(
    ("values", "bounds", "lo", "hi"),
    [
        # two seeds: 0.9 -+ 12.706 * 0.1 is cut at both ends
        ([0.8, 1.0], SHARE, 0.0, 1.0),
        # 0.5 -+ 4.3027 * 0.05 / sqrt(3) lies within
        ([0.45, 0.5, 0.55], SHARE, 0.37579, 0.62421),
        # questions that one arm alone has right, or both: 2/3 -+ 4.3027 / 3
        ([1.0, 1.0, 0.0], SHARE_DIFFERENCE, -0.76755, 1.0),
        ([0.0, 0.0, -1.0], SHARE_DIFFERENCE, -1.0, 1.0),
        # nats: 0.1 -+ 12.706 * 0.1
        ([0.0, 0.2], AT_LEAST_ZERO, 0.0, 1.37062),
        # Clopper and Pearson (1934) of n of n: from 0.025^(1/n)
        ([1.0, 1.0, 1.0], SHARE, 0.29240, 1.0),
        ([0.0, 0.0, 0.0, 0.0], SHARE, 0.0, 0.60236),
        ([1.0, 1.0, 1.0], SHARE_DIFFERENCE, 2 * 0.29240 - 1, 1.0),
        ([0.0, 0.0], SHARE_DIFFERENCE, 0.0, 0.0),
        ([0.0, 0.0], AT_LEAST_ZERO, 0.0, 0.0),
    ],
)
def test_an_interval_stays_within_what_its_quantity_can_be(
    values: list[float], bounds: tuple[float, float], lo: float, hi: float
) -> None:
    assert mean_interval(values, bounds) == pytest.approx((lo, hi), abs=1e-4)


def test_one_value_has_no_interval_and_none_has_no_mean() -> None:
    assert mean_interval([0.5]) is None
    with pytest.raises(ValueError, match="a mean needs a value: got none"):
        mean_interval([])


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (10, 2.228),
     (19, 2.093), (30, 2.042), (60, 2.000), (120, 1.980)],
)  # fmt: skip
def test_students_quantiles_as_every_table_prints_them(freedom: int, t: float) -> None:
    assert student_t95(freedom) == pytest.approx(t, abs=5.1e-4)


def test_no_freedom_is_refused() -> None:
    with pytest.raises(ValueError, match="freedom must be >= 1: got 0"):
        student_t95(0)


def all_resamples(n: int) -> ClusterResamples:
    return ClusterResamples(n, tuple(product(range(n), repeat=n)))


def test_a_paired_difference_over_all_resamples() -> None:
    a, b = [0.0, 0.0, 1.0], [1.0, 0.0, 1.0]  # b - a = 1, 0, 0
    found = paired_difference(a, b, all_resamples(3))
    assert found.mean == pytest.approx(1 / 3)
    # Of 27 resamples 8 hold the first question never, 12 once, 6 twice and 1 three times.
    assert found.share == pytest.approx(2 * 8 / 27)
    # The resamples vary by (2/9) / 3, times 3/2 for three units: that is s^2 / n = (1/3) / 3. So
    # the interval is Student's own, of the mean of three independent values.
    assert found.ci95 == pytest.approx(mean_interval([1.0, 0.0, 0.0]))
    # t = (1/3) / (1/3) = 1 with two degrees of freedom: P(|T| > 1) = 1 - 1 / sqrt(3).
    assert found.p == pytest.approx(1 - 1 / sqrt(3))


def test_a_difference_of_shares_is_none_that_shares_cannot_have() -> None:
    """Student's is 2/3 -+ 4.303 / 3: up to +210 points."""
    wide = paired_difference([0.0, 0.0, 0.0], [1.0, 1.0, 0.0], all_resamples(3), SHARE_DIFFERENCE)
    assert wide.mean == pytest.approx(2 / 3)
    assert wide.ci95 == (pytest.approx(-0.76755, abs=1e-5), 1.0)
    back = paired_difference([1.0, 1.0, 0.0], [0.0, 0.0, 0.0], all_resamples(3), SHARE_DIFFERENCE)
    assert back.ci95 == (-1.0, pytest.approx(0.76755, abs=1e-5))
    # Three of three: 2 * 0.025^(1/3) - 1, and three equal signs have the p-value 2 / 8.
    every = paired_difference([0.0] * 3, [1.0] * 3, all_resamples(3), SHARE_DIFFERENCE)
    assert every.ci95 == pytest.approx((2 * 0.025 ** (1 / 3) - 1, 1.0))
    assert every.p == pytest.approx(0.25)


def test_resamples_tend_to_all_resamples() -> None:
    rng = random.Random("test/bootstrap")
    a = [float(rng.random() < 0.4) for _ in range(5)]
    b = [float(rng.random() < 0.7) for _ in range(5)]
    every, some = all_resamples(5), resamples(["one"] * 5, list("abcde"), 20_000, 0)
    exact, drawn = paired_difference(a, b, every), paired_difference(a, b, some)
    assert drawn.mean == exact.mean
    assert drawn.ci95 == pytest.approx(exact.ci95, abs=0.02)
    assert drawn.share == pytest.approx(exact.share, abs=0.02)
    assert drawn.p == pytest.approx(exact.p, abs=0.02)


def test_equal_arms_do_not_differ_and_pairs_have_a_direction() -> None:
    some = resamples(["one"] * 4, list("abcd"), 500, 3)
    a, b = [0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]
    same = paired_difference(a, a, some)
    assert same == Difference(0.0, (0.0, 0.0), 1.0, 1.0)
    there, back = paired_difference(a, b, some), paired_difference(b, a, some)
    assert (there.mean, back.mean, there.share) == (0.5, -0.5, back.share)
    assert there.ci95 == pytest.approx((-back.ci95[1], -back.ci95[0]))
    assert there.p == back.p
    # A difference without any spread: p is that of four equal signs, and no less than 500 resamples
    # can tell.
    always = paired_difference([0.0] * 4, [1.0] * 4, some)
    assert always == Difference(1.0, (1.0, 1.0), 0.0, pytest.approx(2 / 2**4))
    many = resamples(["one"] * 12, list("abcdefghijkl"), 500, 3)
    assert paired_difference([0.0] * 12, [1.0] * 12, many).p == 1 / 501
    alone = resamples(["one"] * 2, ["a"] * 2, 10, 0)
    assert paired_difference([0.0, 0.0], [1.0, 0.0], alone).p == 1.0


def test_documents_are_drawn_and_within_them_facts() -> None:
    documents = ["p", "q", "p", "r", "q", "p"]
    facts = ["a", "a", "a", "a", "b", "b"]  # p: a twice, b; q: a, b; r: a
    some = resamples(documents, facts, 600, 1)
    assert some.units == 3
    of_document: Counter[str] = Counter()
    mixed = 0
    for sample in some.drawn:
        times = Counter(sample)
        assert times[0] == times[2]  # the questions about one fact stay together
        # A document that is drawn k times has k draws of each of its facts' number.
        for name, members, each in (("p", (0, 5), 2), ("q", (1, 4), 2), ("r", (3,), 1)):
            drawn, left = divmod(sum(times[i] for i in members), each)
            assert left == 0
            of_document[name] += drawn
        mixed += times[1] != times[4]
    assert sum(of_document.values()) == 600 * 3
    assert all(abs(n - 600) < 100 for n in of_document.values())
    assert mixed > 200  # facts are drawn too, not taken along
    again = resamples(documents, facts, 5, 1).drawn
    assert again == some.drawn[:5]
    assert again != resamples(documents, facts, 5, 2).drawn
    assert resamples(["one"] * 3, ["a", "b", "b"], 5, 0).units == 2
    with pytest.raises(ValueError, match="needs a question"):
        resamples([], [], 5, 1)


def clustered(rng: random.Random, documents: int, spread: float) -> list[tuple[str, str, float]]:
    """Differences whose mean over documents is 0: each document, fact and question has its own."""
    rows = []
    for d in range(documents):
        of_document = rng.gauss(0.0, spread)
        for f in range(4):
            of_fact = rng.gauss(0.0, 0.5)
            rows += [
                (f"d{d}", f"d{d}/f{f}", of_document + of_fact + rng.gauss(0.0, 0.5))
                for _ in range(2)
            ]
    return rows


@pytest.mark.parametrize(
    ("documents", "spread", "low", "high"),
    [(16, 0.5, 0.93, 0.99), (5, 0.5, 0.93, 0.995), (1, 0.0, 0.91, 0.98)],
)
def test_an_interval_covers_the_truth_as_often_as_it_says(
    documents: int, spread: float, low: float, high: float
) -> None:
    """Of 200 seeded draws of clustered data; two stages err to the wide side."""
    rng = random.Random(f"test/coverage/{documents}")
    covered = 0
    for trial in range(200):
        rows = clustered(rng, documents, spread)
        if documents == 1:  # of this document alone: twelve facts of it
            rows = [(d, f"{f}/{i}", x) for i in range(3) for d, f, x in clustered(rng, 1, 0.0)]
        some = resamples([d for d, _, _ in rows], [f for _, f, _ in rows], 200, trial)
        found = paired_difference([0.0] * len(rows), [x for _, _, x in rows], some)
        covered += found.ci95[0] <= 0.0 <= found.ci95[1]
    assert low <= covered / 200 <= high


def test_holm_by_hand() -> None:
    # Sorted .01 .03 .04: 3 * .01 = .03, 2 * .03 = .06, 1 * .04 -> no less than .06.
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.6]) == pytest.approx([1.0, 1.0])
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def test_the_p_value_of_a_mean_by_hand() -> None:
    """t is 2 sqrt(3) at 2 degrees of freedom, where P(|T| <= t) is t / sqrt(2 + t * t)."""
    assert mean_p([1.0, 2.0, 3.0]) == pytest.approx(1 - math.sqrt(12 / 14))
    assert mean_p([-1.0, 1.0]) == pytest.approx(1.0)
    assert (mean_p([]), mean_p([4.0]), mean_p([0.0, 0.0])) == (1, 1, 1)
    assert mean_p([2.0, 2.0, 2.0, 2.0]) == pytest.approx(2 / 2**4)  # four equal signs


def row(arm: str, id: str, nll: float | None, document: str = "a", **more: Any) -> Any:
    return {
        "arm": arm, "step": 0, "sampled": False, "id": id, "fact": f"what is {id}?",
        "document": document, "document_hash": "d", "question_hash": id, "text": f"{arm} says",
        "answer": None, "expected": f"it is {id}", "right": 0.0, "nll": nll, "reward": None,
        "tokens": 1, **more,
    }  # fmt: skip


def test_the_share_closed_is_that_of_the_means() -> None:
    """none 4 and 2, cartridge 2 and 2, document 1 and 1: (3 - 2) / (3 - 1)."""
    rows = [
        row("none", "x", 4.0), row("none", "y", 2.0), row("document", "x", 1.0),
        row("document", "y", 1.0), row("on_policy", "x", 2.0), row("on_policy", "y", 2.0),
        row("on_policy", "z", 9.0),  # which no other arm answered
        row("on_policy", "x", 8.0, sampled=True), row("none", "held out", 1.0, right=None),
    ]  # fmt: skip
    found = gold_results(rows)
    assert found is not None
    assert (found["n"], found["documents"]) == (2, 1)
    arms = found["arms"]
    assert list(arms) == ["none", "document", "on_policy"]
    assert [arms[a]["nll"] for a in arms] == [3.0, 1.0, 2.0]
    assert [arms[a]["closed"] for a in arms] == [0.0, 1.0, 0.5]
    # Resamples of two facts: xx gives 2/3, yy 0, xy 1/2.
    assert arms["on_policy"]["ci95"] == [0.0, pytest.approx(2 / 3)]
    assert arms["document"]["ci95"] == [1.0, 1.0]


def test_without_a_gap_or_a_baseline_there_is_no_share() -> None:
    flat = [row("none", "x", 1.0), row("document", "x", 1.0), row("on_policy", "x", 1.0)]
    found = gold_results(flat)
    assert found is not None
    assert found["arms"]["on_policy"] == {"nll": 1.0, "closed": None, "ci95": None}
    found = gold_results(flat[2:])
    assert found is not None
    assert found["arms"] == {"on_policy": {"nll": 1.0, "closed": None, "ci95": None}}
    assert gold_results([row("none", "x", None)]) is None


def test_answers_stand_side_by_side() -> None:
    arms, shown = side_by_side([row("on_policy", "x", 2.0), row("none", "x", 4.0)])
    assert arms == ["none", "on_policy"]
    assert shown == [
        ("what is x?", "it is x", {"none": "none says", "on_policy": "on_policy says"})
    ]
