"""The books by hand: money, rates, concurrency and breakers, each as the rows come in."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cartridge_forge.plugins.chat.messages import TeacherUsage
from cartridge_forge.plugins.replay.budget import (
    ANSWERED,
    INTERRUPTED,
    AlreadyAnswered,
    Budget,
    CallLater,
    CallNow,
    CallRefused,
    ReservedCall,
    SettledCall,
    SpendLimits,
    SpendTotals,
    TeacherCall,
)
from cartridge_forge.plugins.replay.spec import PriceSpec, ReplaySpec, ReplayTeacherSpec

LIMITS = SpendLimits(
    run_cap=100, teacher_cap=60, concurrency=3, requests_per_minute=None, breaker_failures=3,
    breaker_cooldown_s=10.0,
)  # fmt: skip


def books(**other: object) -> Budget:
    limits = SpendLimits(**{**LIMITS.__dict__, **other})
    return Budget({"a": limits, "b": limits})


def add(budget: Budget, row: ReservedCall | SettledCall) -> None:
    """Add a row as if both clocks showed the same."""
    budget.add(row, row.time)


def call(key: str = "k", nano: int = 10, teacher: str = "a", run: str = "r") -> TeacherCall:
    return TeacherCall(key, teacher, run, nano)


def reserved(
    attempt: str,
    nano: int = 10,
    time: float = 0.0,
    teacher: str = "a",
    key: str = "",
    run: str = "r",
) -> ReservedCall:
    return ReservedCall(attempt, key or f"key {attempt}", teacher, run, "owner", nano, time)


def settled(
    attempt: str,
    nano: int = 4,
    time: float = 0.0,
    outcome: str = ANSWERED,
    teacher: str = "a",
    key: str = "",
    run: str = "r",
    retry_after_s: float = 0.0,
    usable: bool | None = None,
) -> SettledCall:
    answered = outcome == ANSWERED
    usage = TeacherUsage(1, 1) if answered else None
    return SettledCall(
        attempt, key or f"key {attempt}", teacher, run, outcome, nano, usage, "", False,
        answered if usable is None else usable, 0.1, 1, retry_after_s, time,
    )  # fmt: skip


def test_a_reservation_holds_its_worst_case_until_it_is_settled() -> None:
    b = books()
    add(b, reserved("1", 30))
    assert b.totals("r") == b.totals("r", "a") == SpendTotals(held=30, calls=1)
    add(b, settled("1", 12))
    assert b.totals("r") == SpendTotals(spent=12, calls=1, answered=1)
    add(b, reserved("2", 30))
    add(b, settled("2", 30, outcome="timeout"))  # nobody said what it cost
    assert b.totals("r") == SpendTotals(spent=42, presumed=30, calls=2, answered=1)
    add(b, reserved("3", 30))
    add(b, settled("3", 0, outcome="rate_limited"))
    assert b.totals("r") == SpendTotals(spent=42, presumed=30, calls=3, answered=1)
    add(b, settled("3", 20))  # settled twice: the first counts
    assert b.totals("r").spent == 42
    assert b.totals("other") == SpendTotals()


def test_the_last_nanodollar_can_be_spent_and_not_one_more() -> None:
    b = books(teacher_cap=100)
    add(b, reserved("1", 90))
    add(b, settled("1", 90))
    assert b.admit(call(nano=10), 0.0) == CallNow("", "")
    assert b.admit(call(nano=11), 0.0) == CallRefused("budget_run")
    assert b.admit(call(nano=11, run="another"), 0.0) == CallNow("", "")


@pytest.mark.parametrize(
    ("outcome", "repeated"),
    [(INTERRUPTED, True), ("timeout", True), ("cut_off", True), ("http_500", False)],
)
def test_a_call_whose_end_is_unknown_is_repeated_by_its_key(outcome: str, repeated: bool) -> None:
    b = books(breaker_failures=9)
    add(b, reserved("1", key="k"))
    add(b, settled("1", 10, outcome=outcome, key="k"))
    assert b.admit(call("k"), 0.0) == CallNow("", "1" if repeated else "")
    add(b, replace(reserved("2", key="k"), request="1"))
    add(b, settled("2", 10, outcome="timeout", key="k"))
    assert b.admit(call("k"), 0.0) == CallNow("", "1")  # still that of the first
    assert b.admit(call("other"), 0.0) == CallNow("", "")
    add(b, reserved("3", key="k"))
    add(b, settled("3", 0, outcome="http_500", key="k"))  # the provider said how it ended
    assert b.admit(call("k"), 0.0) == CallNow("", "")


def test_who_might_still_be_paid_back_is_waited_for() -> None:
    b = books(teacher_cap=100)
    add(b, reserved("1", 95))
    assert b.admit(call(nano=10), 0.0) == CallLater(0.1, "budget_run")
    add(b, settled("1", 5))
    assert b.admit(call(nano=10), 0.0) == CallNow("", "")


def test_each_teacher_has_its_own_cap_within_the_run_s() -> None:
    b = books()
    add(b, reserved("1", 55))
    add(b, settled("1", 55))
    assert b.admit(call(nano=6), 0.0) == CallRefused("budget_teacher")
    assert b.admit(call(nano=6, teacher="b"), 0.0) == CallNow("", "")
    add(b, reserved("2", 41, teacher="b"))
    add(b, settled("2", 41, teacher="b"))
    assert b.admit(call(nano=5, teacher="b"), 0.0) == CallRefused("budget_run")


def test_an_answer_is_never_bought_again_and_a_failure_is() -> None:
    b = books()
    add(b, reserved("1", key="k"))
    assert b.admit(call("k"), 0.0) == CallLater(0.05, "deadline")  # somebody is asking just that
    add(b, failed := settled("1", 0, outcome="http_500", key="k"))
    assert b.admit(call("k"), 0.0) == CallNow("", "")
    assert b.last["k"] == failed
    add(b, reserved("2", key="k"))
    add(b, answer := settled("2", key="k"))
    assert b.admit(call("k"), 0.0) == AlreadyAnswered(answer)
    add(b, reserved("3", 1000))
    assert b.admit(call("k", 10**9), 0.0) == AlreadyAnswered(answer)  # whatever the purse holds


def test_who_costs_more_than_the_worst_case_is_not_asked_again() -> None:
    b = books()
    add(b, reserved("1", 10))
    add(b, settled("1", 11))
    assert b.admit(call(), 0.0) == CallRefused("price_exceeded")
    assert b.admit(call(teacher="b"), 0.0) == CallNow("", "")


def test_concurrency_is_over_everybody() -> None:
    b = books()
    for attempt in "123":
        add(b, reserved(attempt))
    assert b.admit(call(), 0.0) == CallLater(0.02, "deadline")
    assert b.admit(call(teacher="b"), 0.0) == CallNow("", "")
    add(b, settled("2"))
    assert b.admit(call(), 0.0) == CallNow("", "")


def test_calls_begun_in_any_minute() -> None:
    b = books(requests_per_minute=2, concurrency=99)
    add(b, reserved("1", time=100.0))
    add(b, reserved("2", time=130.0))
    assert b.admit(call(), 140.0) == CallLater(20.0, "rate_limited")
    assert b.admit(call(), 160.0) == CallNow("", "")
    add(b, reserved("3", time=160.0))
    assert b.admit(call(), 161.0) == CallLater(29.0, "rate_limited")


def test_retry_after_holds_for_everybody() -> None:
    b = books()
    add(b, reserved("1"))
    add(b, settled("1", 0, time=50.0, outcome="rate_limited", retry_after_s=7.0))
    assert b.admit(call(), 51.0) == CallLater(6.0, "rate_limited")
    assert b.admit(call(), 57.0) == CallNow("", "")


def test_the_breaker_opens_and_half_opens_and_closes() -> None:
    b = books(concurrency=99)

    def fails(attempt: str, time: float) -> None:
        add(b, reserved(attempt, 1, time))
        add(b, settled(attempt, 0, time, "http_500"))

    fails("1", 1.0)
    fails("2", 2.0)
    assert b.admit(call(), 2.0) == CallNow("", "")
    add(b, reserved("ok", 1, 2.5))
    add(b, settled("ok", 1, 2.5))  # one good answer and the count begins anew
    fails("3", 3.0)
    fails("4", 4.0)
    add(b, reserved("late", 1, 4.0))
    fails("5", 5.0)
    assert b.admit(call(), 5.0) == CallRefused("circuit_open")
    assert b.admit(call(teacher="b"), 5.0) == CallNow("", "")
    add(b, settled("late", 0, 9.0, "http_500"))  # begun before it opened: it changes nothing
    assert b.admit(call(), 14.9) == CallRefused("circuit_open")
    assert b.admit(call(), 15.0) == CallNow("", "")  # half open: one probe
    add(b, reserved("probe", 1, 15.0))
    assert b.admit(call(), 15.1) == CallRefused("circuit_open")
    add(b, settled("probe", 0, 16.0, "timeout"))
    assert b.admit(call(), 25.9) == CallRefused("circuit_open")
    add(b, reserved("probe 2", 1, 26.0))
    add(b, settled("probe 2", 1, 26.5))
    assert b.admit(call(), 26.5) == CallNow("", "")


def test_answers_that_are_no_votes_open_the_breaker_too() -> None:
    b = books()
    for attempt in "123":
        add(b, reserved(attempt, 1))
        add(b, settled(attempt, 1, usable=False))
    assert b.admit(call(), 1.0) == CallRefused("circuit_open")


def test_our_own_death_does_not_count_against_the_teacher() -> None:
    b = books()
    for attempt in "1234":
        add(b, reserved(attempt, 1))
        add(b, settled(attempt, 1, outcome=INTERRUPTED))
    assert b.admit(call(), 0.0) == CallNow("", "")
    for attempt in "567":
        add(b, reserved(attempt, 1, 1.0))
        add(b, settled(attempt, 0, 1.0, "cut_off"))
    add(b, reserved("probe", 1, 12.0))
    add(b, settled("probe", 1, 13.0, INTERRUPTED))
    assert b.admit(call(), 13.0) == CallNow("", "")  # another may probe at once


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.integers(0, 40),  # worst case
            st.floats(0, 1),  # of it, the share that is charged
            st.sampled_from([ANSWERED, "timeout", "rate_limited", INTERRUPTED]),
            st.integers(0, 5),  # how many others begin before it ends
        ),
        max_size=40,
    )
)
def test_whatever_is_asked_the_caps_hold(
    steps: list[tuple[str, int, float, str, int]],
) -> None:
    b = books(concurrency=10**6, breaker_failures=10**6)
    open_calls: list[tuple[int, SettledCall]] = []
    for i, (teacher, worst, share, outcome, delay) in enumerate(steps):
        if b.admit(call(str(i), worst, teacher), 0.0) == CallNow("", ""):
            add(b, reserved(str(i), worst, teacher=teacher))
            paid = worst if outcome in ("timeout", INTERRUPTED) else int(worst * share)
            open_calls.append((i + delay, settled(str(i), paid, outcome=outcome, teacher=teacher)))
        for due, row in [o for o in open_calls if o[0] <= i]:
            add(b, row)
            open_calls.remove((due, row))
        whole, a, other = b.totals("r"), b.totals("r", "a"), b.totals("r", "b")
        assert whole.spent + whole.held <= 100
        assert max(a.spent + a.held, other.spent + other.held) <= 60
        assert whole.spent == a.spent + other.spent
        assert whole.held == a.held + other.held == sum(r.nanodollars for r in b.in_flight.values())


def test_folding_needs_no_limits_of_a_teacher_that_is_not_asked() -> None:
    b = books()
    add(b, reserved("1", teacher="stranger"))
    add(b, settled("1", teacher="stranger", outcome="http_500"))
    assert b.totals("r", "stranger").calls == 1
    with pytest.raises(KeyError):
        b.admit(call(teacher="stranger"), 0.0)


GOOD: dict[str, Any] = {
    "name": "a",
    "provider": "openai",
    "model": "m",
    "prices": PriceSpec(input=1.0, output=2.0),
}


def test_official_servers_and_keys_are_known() -> None:
    spec = ReplayTeacherSpec(**GOOD)
    assert (spec.base_url, spec.key_env) == ("https://api.openai.com/v1", "OPENAI_API_KEY")
    other = ReplayTeacherSpec(**GOOD | {"provider": "anthropic"})
    assert (other.base_url, other.key_env) == ("https://api.anthropic.com", "ANTHROPIC_API_KEY")
    router = ReplayTeacherSpec(**GOOD | {"base_url": "https://openrouter.ai/api/v1/"})
    assert router.base_url == "https://openrouter.ai/api/v1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_url": "openrouter.ai"}, "must be an http"),
        ({"base_url": "https://u:p@x.org"}, "must hold no user, password or query"),
        ({"base_url": "https://x.org?key=1"}, "must hold no user, password or query"),
        ({"key_env": "sk-secret"}, "must be the name of an environment variable"),
        ({"prices": {"input": 0.0001, "output": 1.0}}, "must be a multiple of 0.001"),
        ({"max_tokens": 0}, "greater than or equal to 1"),
    ],
)
def test_a_broken_rule_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ReplayTeacherSpec(**GOOD | change)


def test_teachers_have_names_and_quorums_can_be_met() -> None:
    a = ReplayTeacherSpec(**GOOD)
    with pytest.raises(ValidationError, match="rename the second a"):
        ReplaySpec(teachers=(a, a), cap=1.0)
    with pytest.raises(ValidationError, match="the number of teachers"):
        ReplaySpec(teachers=(a,), cap=1.0, quorum=2)
