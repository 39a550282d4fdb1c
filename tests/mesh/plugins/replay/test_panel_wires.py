"""Asking over the official SDKs: whatever a provider does there is a vote or an abstention, in
time, with its money accounted for and no secret anywhere."""

import asyncio
import json
import logging
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from replay_setup import (
    KEY,
    KEY_ENV,
    a_spec,
    a_state,
    a_teacher,
    answer,
    canonical_read,
    case,
    ledger_rows,
    right,
    wrong,
)
from rooms.teachers.panel_setup import MODELS, both, judge, totals

from cartridge_forge.plugins.chat.messages import (
    NANO,
    PanelVerdict,
    ReplayState,
    TeacherUsage,
    TeacherVote,
    ToolAction,
)
from cartridge_forge.plugins.replay.budget import ANSWERED, SpendTotals
from cartridge_forge.plugins.replay.clients import connect
from cartridge_forge.plugins.replay.fake_provider.app import (
    FakeProvider,
    FaultRates,
    ProviderRequest,
)
from cartridge_forge.plugins.replay.ledger import SpendLedger
from cartridge_forge.plugins.replay.panel import (
    TeacherPanel,
    ask_teachers,
    hint_of_teacher,
    limits_of,
    worst,
)
from cartridge_forge.plugins.replay.prompts import (
    HINT_INSTRUCTIONS,
    TeacherClient,
    TeacherReply,
    render,
)
from cartridge_forge.plugins.replay.spec import ReplaySpec
from cartridge_forge.protocols.errors import SpecError


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)


def wait_for_a_call(provider: FakeProvider) -> None:
    deadline = time.monotonic() + 60
    while not provider.served and time.monotonic() < deadline:
        time.sleep(0.01)


def test_two_wires_one_vote(provider: FakeProvider, path: Path) -> None:
    spec = a_spec(*both(provider))
    (verdict,) = judge(path, spec, a_state(7))
    assert verdict.reason == "pair"
    assert (verdict.chosen, verdict.rejected) == (canonical_read(7), canonical_read(99))
    assert [vote.attempts for vote in verdict.votes] == [1, 1]
    by_attempt = {s.attempt: s for s in provider.served}
    assert {s.wire for s in provider.served} == {"chat", "messages"}
    for row in ledger_rows(path):
        if row["kind"] == "settled":
            served = by_attempt.pop(row["attempt"])
            assert row["nanodollars"] == served.nanodollars > 0
            assert row["usage"] == served.usage.__dict__
    assert not by_attempt
    assert sum(v.nanodollars for v in verdict.votes) == provider.money()
    assert totals(path, spec) == SpendTotals(spent=provider.money(), calls=2, answered=2)


def hints(
    path: Path, spec: ReplaySpec, *states: ReplayState, online: bool = True
) -> list[tuple[str, str]]:
    """The hints of the first teacher, asked for one after the other."""

    async def ask() -> list[tuple[str, str]]:
        ledger = SpendLedger(path, limits_of(spec))
        clients = {t.name: connect(t) for t in spec.teachers} if online else {}
        desk = TeacherPanel(spec, ledger, "run", clients)
        try:
            late = time.monotonic() + 60.0
            return [await hint_of_teacher(desk, spec.teachers[0], s, "Hint?", late) for s in states]
        finally:
            await desk.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("which", [0, 1])
def test_a_hint_is_paid_once_out_of_the_votes_budget(
    provider: FakeProvider, path: Path, which: int
) -> None:
    def write(asked: ProviderRequest) -> str:
        assert asked.system.startswith(HINT_INSTRUCTIONS)
        text = f"read note {case(asked)}."
        return json.dumps({"kind": "text", "tool": "", "arguments": "", "answer": text})

    provider.rule = write
    spec = a_spec(both(provider)[which])
    assert hints(path, spec, a_state(7), a_state(7)) == [("read note 7.", "")] * 2
    assert totals(path, spec) == SpendTotals(spent=provider.money(), calls=1, answered=1)
    assert hints(path, spec, a_state(7), online=False) == [("read note 7.", "")]
    assert hints(path, spec, a_state(8), online=False) == [("", "not_in_ledger")]
    poor = spec.model_copy(update={"cap": 1e-9})
    assert hints(path, poor, a_state(8)) == [("", "budget_run")]


def test_a_teacher_that_gives_no_hint_says_why(provider: FakeProvider, path: Path) -> None:
    spec = a_spec(both(provider, attempts=2)[0])
    assert hints(path, spec, a_state(1)) == [("", "unparseable: no hint")]  # an action
    provider.faults = FaultRates(refuse=1.0)
    assert hints(path, spec, a_state(2)) == [("", "refused")]
    provider.faults = FaultRates(server_error=1.0)
    assert hints(path, spec, a_state(3)) == [("", "http_500")]
    assert totals(path, spec).spent == provider.money()


def test_the_third_is_paid_only_when_two_cheaper_ones_disagree(
    provider: FakeProvider, path: Path
) -> None:
    def rule(asked: ProviderRequest) -> str:
        odd = asked.model == "model-b" and "Case 5." in asked.user
        return wrong(asked) if odd else right(asked)

    provider.rule = rule
    a, b = both(provider)
    dear = a_teacher("c", provider.openai_url, max_tokens=640)
    spec = a_spec(dear, a, b)
    agreed, settled_by_third = judge(path, spec, a_state(4), a_state(5))
    assert [vote.teacher for vote in agreed.votes] == ["a", "b"]
    assert [vote.teacher for vote in settled_by_third.votes] == ["a", "b", "c"]
    assert settled_by_third.chosen == canonical_read(5)
    assert settled_by_third.counts == ((canonical_read(5), 2), (canonical_read(1005), 1))


def test_states_not_worth_asking_about_cost_nothing(provider: FakeProvider, path: Path) -> None:
    spec = a_spec(*both(provider)).model_copy(update={"gate": a_spec(*both(provider)).gate})
    spec = spec.model_copy(update={"gate": spec.gate.model_copy(update={"everywhere": False})})
    (verdict,) = judge(path, spec, a_state(error_kind="", confidence=0.9))
    assert (verdict.reason, verdict.votes) == ("not_worth_asking", ())
    assert provider.served == []


def test_the_second_time_nobody_is_asked(provider: FakeProvider, path: Path) -> None:
    spec = a_spec(*both(provider))
    states = [a_state(i) for i in range(3)]
    first = judge(path, spec, *states)
    asked = len(provider.served)
    assert judge(path, spec, *states) == first
    # Another episode met the same state and did the right thing there: the votes serve it too.
    met = [replace(a_state(1), trace_id="x", student_action=right_action(1))]
    assert judge(path, spec, *met, run="another")[0].reason == "agrees_with_student"
    assert len(provider.served) == asked == 6


def right_action(note: int) -> ToolAction:
    return ToolAction("read_value", {"note": note, "name": "hemoglobin"})


def test_a_provider_that_is_not_there(path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        spec = a_spec(a_teacher("a", url), a_teacher("b", url, "anthropic"))
        (verdict,) = judge(path, spec, a_state())
    assert [vote.error for vote in verdict.votes] == ["unreachable"] * 2
    assert totals(path, spec) == SpendTotals(calls=6)  # nothing was sent, nothing is owed


def test_a_vote_that_is_cancelled_leaves_its_money_settled(
    provider: FakeProvider, path: Path
) -> None:
    provider.faults = FaultRates(stall=1.0)
    spec = a_spec(a_teacher("a", provider.openai_url), quorum=1)

    async def ask_and_cancel() -> None:
        ledger = SpendLedger(path, limits_of(spec))
        desk = TeacherPanel(spec, ledger, "run", {"a": connect(spec.teachers[0])})
        asking = asyncio.create_task(ask_teachers(desk, a_state()))
        await asyncio.to_thread(wait_for_a_call, provider)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await desk.close()

    asyncio.run(ask_and_cancel())
    whole = worst(spec.teachers[0], render(a_state()))
    assert totals(path, spec) == SpendTotals(spent=whole, presumed=whole, calls=1)


def test_a_vote_that_is_cancelled_before_its_call_owes_nothing(
    provider: FakeProvider, path: Path
) -> None:
    spec = a_spec(a_teacher("a", provider.openai_url), quorum=1)

    async def cancel_while_the_ledger_is_locked() -> None:
        ledger, other = SpendLedger(path, limits_of(spec)), SpendLedger(path, limits_of(spec))
        desk = TeacherPanel(spec, ledger, "run", {"a": connect(spec.teachers[0])})
        with other._locked():
            asking = asyncio.create_task(ask_teachers(desk, a_state()))
            await asyncio.sleep(0.1)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        async with asyncio.timeout(60):
            while other.totals("run") != SpendTotals(calls=1):  # noqa: ASYNC110  # in another thread
                await asyncio.sleep(0.02)
        assert (await ask_teachers(desk, a_state())).reason == "pair"
        await desk.close()
        other.close()

    asyncio.run(cancel_while_the_ledger_is_locked())
    assert len(provider.served) == 1


def test_the_purse_is_spent_to_the_last_call_that_fits(provider: FakeProvider, path: Path) -> None:
    teacher = a_teacher("a", provider.openai_url)
    worst_call = worst(teacher, render(a_state(10)))
    spec = a_spec(teacher, quorum=1, cap=(worst_call + 300_000) / NANO)
    verdicts = judge(path, spec, *(a_state(i) for i in range(10, 30)))
    errors = [v.votes[0].error for v in verdicts]
    bought = errors.count("")
    assert 0 < bought < 20
    assert errors == [""] * bought + ["budget_run"] * (20 - bought)
    spent = totals(path, spec).spent
    assert spent == provider.money()
    assert 300_000 < spent <= worst_call + 300_000
    # Another run has a purse of its own, and what is known is free for it.
    again = judge(path, spec, *(a_state(i) for i in range(10, 10 + bought)), run="another")
    assert [v.reason for v in again] == ["pair"] * bought
    assert totals(path, spec, "another") == SpendTotals()


def test_a_rate_limit_is_kept(provider: FakeProvider, path: Path) -> None:
    teacher = a_teacher("a", provider.openai_url, requests_per_minute=2)
    spec = a_spec(teacher, quorum=1, deadline_s=30.0)
    verdicts = judge(path, spec, *(a_state(i) for i in range(3)))
    assert [v.votes[0].error for v in verdicts] == ["", "", "rate_limited"]
    assert len(provider.served) == 2


def test_one_question_asked_by_many_at_once_is_paid_once(
    provider: FakeProvider, path: Path
) -> None:
    provider.faults = FaultRates(latency_s=0.2)
    spec = a_spec(a_teacher("a", provider.openai_url), quorum=1)

    async def ask_at_once() -> list[PanelVerdict]:
        desks = []
        for _ in range(3):
            ledger = SpendLedger(path, limits_of(spec))
            desks.append(TeacherPanel(spec, ledger, "run", {"a": connect(spec.teachers[0])}))
        asked = [ask_teachers(desk, a_state()) for desk in desks for _ in range(2)]
        verdicts = await asyncio.gather(*asked)
        for desk in desks:
            await desk.close()
        return verdicts

    verdicts = asyncio.run(ask_at_once())
    assert all(verdict == verdicts[0] for verdict in verdicts)
    assert len(provider.served) == 1


def test_what_the_provider_says_that_it_cost_is_believed(path: Path) -> None:
    """OpenRouter's `usage.cost`; and who charges more than the worst case is asked no more."""

    async def nothing() -> None:
        pass

    async def client(*_: Any) -> TeacherReply:
        return TeacherReply(ANSWERED, answer(0), False, TeacherUsage(1, 1), charges.pop(0))

    charges = [777, 10**12]
    spec = a_spec(a_teacher("a", "http://127.0.0.1:1"), quorum=1)
    ledger = SpendLedger(path, limits_of(spec))
    desk = TeacherPanel(spec, ledger, "run", {"a": TeacherClient(client, nothing)})

    async def ask() -> list[TeacherVote]:
        return [(await ask_teachers(desk, a_state(i))).votes[0] for i in range(3)]

    first, second, third = asyncio.run(ask())
    assert (first.nanodollars, second.nanodollars) == (777, 10**12)
    assert (third.error, third.canonical) == ("price_exceeded", None)
    ledger.close()


@pytest.mark.parametrize("key", ["", "sk-abc\n", "sk abc", "sk-\u2603"])
def test_a_missing_key_is_the_user_s_mistake(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_ENV, key)
    with pytest.raises(SpecError, match=f"{KEY_ENV} must hold its API key, got") as caught:
        connect(a_teacher("a", "http://127.0.0.1:1"))
    assert "sk" not in str(caught.value).replace("asked", "")


def test_no_secret_is_ever_written_or_said(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A provider that repeats the key in its errors, and another that does so in its answers."""
    secret = "sk-live-THE-SECRET-42"
    monkeypatch.setenv(KEY_ENV, secret)
    caplog.set_level(logging.DEBUG)

    def telling(asked: ProviderRequest) -> str:
        return right(asked).replace("hemoglobin", secret)

    said: list[str] = []
    for key in ("another", None):
        with FakeProvider(telling, MODELS, key=key) as provider:
            spec = a_spec(*both(provider))
            verdicts = judge(path, spec, a_state(1 if key else 2))
            said += [repr(spec), repr(verdicts), provider.served[-1].attempt if not key else ""]
            expected = "http_401" if key else ""
            assert [v.error for v in verdicts[0].votes] == [expected] * 2
    assert "[key]" in said[-2]
    everything = "\n".join([path.read_text(), caplog.text, *said])
    assert secret not in everything
    assert caplog.records  # the SDKs did log
