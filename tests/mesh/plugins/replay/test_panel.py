"""Asking over the official SDKs: whatever a provider does there is a vote or an abstention, in
time, with its money accounted for and no secret anywhere."""

import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from replay_setup import KEY, KEY_ENV, a_spec, a_state, a_teacher, right, wrong
from rooms.teachers.panel_setup import MODELS, both, judge, totals

from cartridge_forge.plugins.replay.budget import SpendTotals
from cartridge_forge.plugins.replay.fake_provider.app import (
    FakeProvider,
    FaultRates,
    sometimes_right,
)
from cartridge_forge.plugins.replay.panel import worst
from cartridge_forge.plugins.replay.prompts import render

SLOW = {"timeout_s": 60.0}  # none times out that is not to


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)


def test_offline_the_ledger_gives_the_same_votes(path: Path, monkeypatch: Any) -> None:
    rule = sometimes_right(right, wrong, 0.7, seed=2)
    faults = FaultRates(rate_limit=0.1, server_error=0.1, garbage=0.1, refuse=0.1, cut_off=0.1,
                    retry_after_s=0.01, seed=1)  # fmt: skip
    with FakeProvider(rule, MODELS, faults) as provider:
        spec = a_spec(*both(provider, attempts=2), a_teacher("c", provider.openai_url, attempts=2))
        states = [a_state(i) for i in range(25)]
        online = judge(path, spec, *states)
    assert len({v.reason for v in online}) >= 3
    errors = {vote.error for v in online for vote in v.votes}
    assert {"", "refused", "unparseable: not the JSON asked for"} <= errors
    before = path.read_bytes()

    def no_network(*_: Any) -> Any:
        raise AssertionError("the network was used")

    monkeypatch.delenv(KEY_ENV)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    assert judge(path, spec, *states, online=False) == online
    (unknown,) = judge(path, spec, a_state(1000), online=False)
    assert [vote.error for vote in unknown.votes] == ["not_in_ledger"] * 2
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("fault", "error", "attempts", "presumed"),
    [
        ("server_error", "http_500", 3, False),
        ("rate_limit", "rate_limited", 3, False),
        ("cut_off", "cut_off", 3, True),
        ("malformed", "unreadable", 3, True),
        ("stall", "timeout", 2, True),
        ("garbage", "unparseable: not the JSON asked for", 1, False),
        ("refuse", "refused", 1, False),
    ],
)
def test_a_teacher_that_fails_abstains(
    provider: FakeProvider, path: Path, fault: str, error: str, attempts: int, presumed: bool
) -> None:
    provider.faults = FaultRates(**{fault: 1.0})
    spec = a_spec(
        *both(provider, **({"timeout_s": 0.5, "attempts": 2} if fault == "stall" else SLOW))
    )
    (verdict,) = judge(path, spec, a_state())
    assert verdict.reason == "too_few_votes"
    assert [(v.canonical, v.error, v.attempts) for v in verdict.votes] == [
        (None, error, attempts)
    ] * 2
    assert len(provider.served) == 2 * attempts
    # What nobody said the cost of counts in full; what was said counts as said; errors are free.
    whole = sum(worst(t, render(a_state())) for t in spec.teachers) * attempts
    assert totals(path, spec).spent == (whole if presumed else provider.money())
    assert totals(path, spec).presumed == (whole if presumed else 0)
    assert provider.money() <= whole


def test_what_fails_once_is_asked_again(provider: FakeProvider, path: Path) -> None:
    """Of one prompt, the first two calls fail under this seed, and the third is answered."""
    spec = a_spec(a_teacher("a", provider.openai_url), quorum=1)
    prompt = "model-a/" + render(a_state()).system + "/" + render(a_state()).user
    for seed in range(1000):
        faults = FaultRates(rate_limit=0.5, seed=seed, retry_after_s=0.1)
        if [bool(faults.drawn(f"{n}/{prompt}")) for n in (1, 2, 3)] == [True, True, False]:
            break
    provider.faults = faults
    begun = time.monotonic()
    (verdict,) = judge(path, spec, a_state())
    assert time.monotonic() - begun >= 0.2  # Retry-After, twice
    assert (verdict.reason, verdict.votes[0].attempts) == ("pair", 3)
    assert totals(path, spec) == SpendTotals(spent=provider.money(), calls=3, answered=1)


def test_a_stalling_teacher_cannot_hold_a_verdict_past_its_deadline(
    provider: FakeProvider, path: Path
) -> None:
    provider.faults = FaultRates(stall=1.0, stall_s=6000.0)
    spec = a_spec(*both(provider, timeout_s=6000.0), deadline_s=0.5)
    (verdict,) = judge(path, spec, a_state())
    assert [vote.error for vote in verdict.votes] == ["timeout"] * 2


def test_the_breaker_opens_leaves_alone_and_tries_again(
    provider: FakeProvider, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1e9]
    clock = SimpleNamespace(**vars(time) | {"time": lambda: now[0]})
    monkeypatch.setattr("cartridge_forge.plugins.replay.ledger.time", clock)
    monkeypatch.setattr("cartridge_forge.plugins.replay.panel.time", clock)
    provider.faults = FaultRates(server_error=1.0)
    teacher = a_teacher(
        "a", provider.openai_url, attempts=1, breaker_failures=3, breaker_cooldown_s=1.0
    )
    spec = a_spec(teacher, quorum=1)
    down = judge(path, spec, *(a_state(i) for i in range(6)))
    assert [v.votes[0].error for v in down] == ["http_500"] * 3 + ["circuit_open"] * 3
    assert len(provider.served) == 3
    now[0] += 1.05
    still = judge(path, spec, a_state(10), a_state(11))  # half open: one probe, and open again
    assert [v.votes[0].error for v in still] == ["http_500", "circuit_open"]
    provider.faults = FaultRates()
    now[0] += 1.05
    back = judge(path, spec, a_state(20), a_state(21))
    assert [v.reason for v in back] == ["pair", "pair"]
    assert len(provider.served) == 6
