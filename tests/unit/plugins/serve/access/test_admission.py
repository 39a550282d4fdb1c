"""Who is let in, and when the others are told to come again."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from cartridge_forge.plugins.chat.wire.errors import ApiError
from cartridge_forge.plugins.serve.access.admission import Admission, KeyQuota, RequestCost


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def wide(sequences: int, tokens: int = 1) -> RequestCost:
    return RequestCost(sequences, tokens)


def test_the_queue_is_bounded_and_gives_its_room_back() -> None:
    admission = Admission(3, 1000, Clock())
    with ExitStack() as inside:
        inside.enter_context(admission.let_in(wide(2)))
        inside.enter_context(admission.let_in(wide(1)))
        with pytest.raises(ApiError) as refused, admission.let_in(wide(1)):
            pass
        assert (refused.value.status_code, refused.value.retry_after) == (429, 1)
        assert admission.pending == 3
    assert admission.pending == 0
    with admission.let_in(wide(3)):
        assert admission.pending == 3


def test_room_comes_back_whatever_happens_inside() -> None:
    admission = Admission(1, 1000, Clock())
    with pytest.raises(ZeroDivisionError), admission.let_in(wide(1)):
        raise ZeroDivisionError
    assert admission.pending == 0


def test_more_than_there_ever_is_room_for_is_a_mistake() -> None:
    with pytest.raises(
        ApiError, match=r"asks for 4 sequences .* http\.max_pending is 3"
    ) as refused:
        Admission(3, 1000, Clock()).let_in(wide(4)).__enter__()
    assert refused.value.status_code == 400


def test_retry_after_follows_the_measured_rate() -> None:
    clock = Clock()
    admission = Admission(10, 1000, clock)
    for _ in range(5):  # a response each 4 s: 0.25 a second
        with admission.let_in(wide(1)):
            clock.now += 4.0
    assert admission.rate() == pytest.approx(0.25)
    with admission.let_in(wide(10)):
        assert admission.retry_after(1) == 4
        assert admission.retry_after(3) == 12
        assert admission.retry_after(10) == 40
        clock.now += 1000  # nothing ended for long: the rate falls, and the wait has a bound
        assert admission.retry_after(10) == 60


def test_tokens_are_bounded_as_sequences_are() -> None:
    admission = Admission(9, 100, Clock())
    with pytest.raises(ApiError, match=r"cost 101 tokens.*max_pending_tokens is 100") as never:
        admission.let_in(wide(1, 101)).__enter__()
    assert never.value.status_code == 400
    with admission.let_in(wide(1, 60)):
        with pytest.raises(ApiError, match="60 tokens wait or run, and 100 may") as now:
            admission.let_in(wide(1, 41)).__enter__()
        assert now.value.status_code == 429
        with admission.let_in(wide(1, 40)):
            assert admission.tokens == 100
    assert admission.tokens == 0


def test_a_key_has_its_tokens_of_a_minute() -> None:
    clock = Clock()
    quota = KeyQuota("ward", None, 600, clock)  # 10 return each second
    with pytest.raises(ApiError, match="the key ward has 600 a minute") as never:
        quota.reserve(wide(1, 601)).__enter__()
    assert never.value.status_code == 400
    with quota.reserve(wide(1, 500)) as reserved:
        reserved.used = 200
        with pytest.raises(ApiError, match="100 are left, and this request may cost 150") as now:
            quota.reserve(wide(1, 150)).__enter__()
        assert (now.value.status_code, now.value.retry_after) == (429, 5)
    with quota.reserve(wide(1, 400)) as reserved:  # 300 came back
        reserved.used = 400
    clock.now += 3.0
    with pytest.raises(ApiError, match="30 are left") as now:
        quota.reserve(wide(1, 31)).__enter__()
    assert now.value.retry_after == 1
    clock.now += 3600.0  # never more than a minute's
    with quota.reserve(wide(1, 600)), pytest.raises(ApiError, match=" 0 are left"):
        quota.reserve(wide(1, 1)).__enter__()


def test_a_key_has_its_requests_at_a_time() -> None:
    quota = KeyQuota("ward", 2, None, Clock())
    with quota.let_in(), quota.let_in():
        with pytest.raises(ApiError, match="2 requests of the key ward are in flight, and 2 may"):
            quota.let_in().__enter__()
        with quota.reserve(wide(1, 10**12)):
            pass  # no limit of tokens
    with quota.let_in():
        pass
