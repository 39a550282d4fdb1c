"""Who is let in, and when the others are told to come again."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from serving.admission import Admission
from serving.errors import ApiError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_queue_is_bounded_and_gives_its_room_back() -> None:
    admission = Admission(3, Clock())
    with ExitStack() as inside:
        inside.enter_context(admission.let_in(2))
        inside.enter_context(admission.let_in(1))
        with pytest.raises(ApiError) as refused, admission.let_in(1):
            pass
        assert (refused.value.status_code, refused.value.retry_after) == (429, 1)
        assert admission.pending == 3
    assert admission.pending == 0
    with admission.let_in(3):
        assert admission.pending == 3


def test_room_comes_back_whatever_happens_inside() -> None:
    admission = Admission(1, Clock())
    with pytest.raises(ZeroDivisionError), admission.let_in(1):
        raise ZeroDivisionError
    assert admission.pending == 0


def test_more_than_there_ever_is_room_for_is_a_mistake() -> None:
    with pytest.raises(ApiError, match="3 are decoded at a time") as refused:
        Admission(3, Clock()).let_in(4).__enter__()
    assert refused.value.status_code == 400


def test_retry_after_follows_the_measured_rate() -> None:
    clock = Clock()
    admission = Admission(10, clock)
    for _ in range(5):  # a response each 4 s: 0.25 a second
        with admission.let_in(1):
            clock.now += 4.0
    assert admission.rate() == pytest.approx(0.25)
    with admission.let_in(10):
        assert admission.retry_after(1) == 4
        assert admission.retry_after(3) == 12
        assert admission.retry_after(10) == 40
        clock.now += 1000  # nothing ended for long: the rate falls, and the wait has a bound
        assert admission.retry_after(10) == 60
