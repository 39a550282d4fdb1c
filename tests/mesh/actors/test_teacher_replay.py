"""K actors and one purse: spawned by the service, over the official SDKs, on the local provider."""

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from monarch.actor import this_host
from replay_setup import (
    KEY,
    KEY_ENV,
    a_spec,
    a_state,
    a_teacher,
    canonical_read,
    ledger_rows,
    prices,
    right,
    wrong,
)
from starlette.requests import Request
from starlette.responses import Response

from actors.teacher_replay import TeacherReplayActor
from protocols.errors import DataError, ForgeError, SpecError
from protocols.spec.mesh import RoleSpec
from protocols.spec.teacher_replay import PriceSpec, ReplaySpec
from protocols.teacher_replay import NANO, PanelVerdict, ReplayState
from services.pool.pool import Pool
from services.pool.service import Service
from teachers.fake_provider.app import FakeProvider, FaultRates, sometimes_right

ONE_AT_A_TIME = RoleSpec(max_ongoing=1)


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@asynccontextmanager
async def pool_of(
    spec: ReplaySpec, path: Path, n: int, offline: bool = False, role: RoleSpec = ONE_AT_A_TIME
) -> AsyncIterator[Pool]:
    service = await Service.of(
        this_host(), call_timeout_s=400.0, spawn_timeout_s=120.0,
        variables={"teacher_replay": [KEY_ENV]},
    )  # fmt: skip
    try:
        args = (spec, str(path), "run", offline)
        pool = service.spawn(TeacherReplayActor, n=n, args=args, role="teacher_replay", spec=role)
        await service.ready()
        yield pool
    finally:
        await service.stop()


async def ask_all(pool: Pool, states: Sequence[ReplayState]) -> list[PanelVerdict]:
    return list(await asyncio.gather(*(pool.route("vote", state) for state in states)))


# A fifth of all calls. The bill of the first mix is always known; of the second it is lost with
# some answers, and counts in full.
BILLED = FaultRates(
    rate_limit=0.06, server_error=0.06, refuse=0.04, garbage=0.04, latency_s=0.2, seed=5
)  # fmt: skip
UNBILLED = FaultRates(
    rate_limit=0.05, server_error=0.05, cut_off=0.02, malformed=0.02, refuse=0.03, garbage=0.02,
    stall=0.01, latency_s=0.2, stall_s=600.0, seed=5,
)  # fmt: skip


@pytest.mark.parametrize(("faults", "dear"), [(BILLED, 3), (UNBILLED, 1)])
def test_eight_actors_never_spend_more_than_a_dollar(
    path: Path, faults: FaultRates, dear: int
) -> None:
    """A provider that answers slowly and errs 20% of the time; more states than a dollar pays."""
    price = PriceSpec(input=12.0 * dear, output=60.0 * dear, cached=1.2 * dear)
    rule = sometimes_right(right, wrong, 0.8, seed=5)
    models = {f"model-{name}": price for name in "ab"}
    with FakeProvider(rule, models, faults, key=KEY) as provider:
        # Only what stalls takes so long.
        more = {"prices": price, "timeout_s": 15.0 if faults.stall else 60.0}
        spec = a_spec(
            a_teacher("a", provider.openai_url, **more),
            a_teacher("b", provider.url, "anthropic", **more),
            cap=1.0, deadline_s=300.0,
        )  # fmt: skip

        async def hammer() -> tuple[list[PanelVerdict], Any]:
            role = RoleSpec(max_ongoing=4)
            async with pool_of(spec, path, 8, role=role) as pool:
                verdicts = await ask_all(pool, [a_state(i) for i in range(240)])
                return verdicts, await pool.route("totals")

        verdicts, totals = asyncio.run(hammer())
        served = list(provider.served)

    rows = ledger_rows(path)
    spent = held = 0
    worst_of: dict[str, int] = {}
    for row in rows:  # in the order of the decisions
        if row["kind"] == "reserved":
            held += row["nanodollars"]
            worst_of[row["attempt"]] = row["nanodollars"]
            assert spent + held <= NANO
        else:
            held -= worst_of[row["attempt"]]
            spent += row["nanodollars"]
    assert held == 0
    assert totals[""].spent == spent == totals["a"].spent + totals["b"].spent
    assert totals[""].held == 0

    # Every call is accounted for: the provider's calls and the ledger's are the same ones, and each
    # cost what the provider charged, or no less where its bill was lost with its answer.
    settled = {row["attempt"]: row for row in rows if row["kind"] == "settled"}
    assert len(settled) == len(worst_of) == len(rows) // 2
    assert Counter(s.attempt for s in served) == Counter(list(settled))
    known = {a for a, row in settled.items() if row["usage"] or row["nanodollars"] == 0}
    charged = {s.attempt: s.nanodollars for s in served}
    assert {a: settled[a]["nanodollars"] for a in known} == {a: charged[a] for a in known}
    for attempt in settled.keys() - known:
        assert charged[attempt] <= settled[attempt]["nanodollars"] == worst_of[attempt]
    lost = {s.attempt for s in served if s.fault in ("cut_off", "malformed", "stall")}
    assert settled.keys() - known == lost
    assert sum(charged.values()) <= spent <= NANO
    if faults is BILLED:
        assert sum(charged.values()) == spent

    # The dollar is used: what is left would not have paid one more worst case.
    assert NANO - spent < max(worst_of.values())
    share = 1 - sum(not s.fault for s in served) / len(served)
    assert 0.12 < share < 0.28
    reasons = Counter(verdict.reason for verdict in verdicts)
    errors = Counter(vote.error for verdict in verdicts for vote in verdict.votes)
    assert reasons["pair"] > 10
    assert errors["budget_run"] > 10
    for verdict in verdicts:
        if verdict.reason == "pair":
            note = int(verdict.trace_id.split("/")[1])
            assert verdict.chosen in (canonical_read(note), canonical_read(note + 1000))
    print_figures(
        spent=spent / NANO,
        provider=sum(charged.values()) / NANO,
        calls=len(served),
        lost=len(lost),
        share=share,
        seconds=rows[-1]["time"] - rows[0]["time"],
        **{str(k): v for k, v in (reasons + errors).items()},
    )


def print_figures(**figures: float) -> None:
    """Shown by `pytest -s`."""
    sys.stdout.write(f"\n{figures}\n")


class TogetherProvider(FakeProvider):
    """Answers nobody before `together` calls are in its hands at once; counts the most."""

    def __init__(self, together: int) -> None:
        self.together, self.most, self._now = together, 0, 0
        self._all_there = asyncio.Event()
        super().__init__(right, prices(a_spec(a_teacher("a", "http://127.0.0.1:1"))))

    async def _respond(self, http: Request) -> Response:
        self._now += 1
        self.most = max(self.most, self._now)
        if self._now == self.together:
            self._all_there.set()
        await self._all_there.wait()
        try:
            return await super()._respond(http)
        finally:
            self._now -= 1


@pytest.mark.parametrize("n", [1, 8])
def test_eight_actors_do_seven_times_the_work_of_one(path: Path, n: int) -> None:
    """Of as many actors as are asked, each has a state in hand, and no more."""
    with TogetherProvider(n) as provider:
        teacher = a_teacher("a", provider.openai_url, timeout_s=120.0)
        spec = a_spec(teacher, quorum=1, deadline_s=120.0)

        async def ask() -> list[PanelVerdict]:
            async with pool_of(spec, path, n) as pool:
                return await ask_all(pool, [a_state(i) for i in range(2 * n)])

        verdicts = asyncio.run(ask())
    assert {v.reason for v in verdicts} == {"pair"}
    assert provider.most == n


def test_a_killed_actor_s_votes_are_asked_again_and_its_money_counted(path: Path) -> None:
    models = prices(a_spec(a_teacher("a", "http://127.0.0.1:1")))
    with FakeProvider(right, models, FaultRates(latency_s=0.3)) as provider:
        spec = a_spec(a_teacher("a", provider.openai_url), quorum=1)

        async def kill_one() -> list[PanelVerdict]:
            async with pool_of(spec, path, 2) as pool:
                asking = asyncio.create_task(ask_all(pool, [a_state(i) for i in range(12)]))
                while len(provider.served) < 4:  # noqa: ASYNC110  # of its thread there is no event
                    await asyncio.sleep(0.02)
                process = pool.replicas[0].process
                assert process is not None
                os.kill(process.pid, signal.SIGKILL)
                return await asking

        verdicts = asyncio.run(kill_one())
        assert [v.chosen for v in verdicts] == [canonical_read(i) for i in range(12)]
        rows = ledger_rows(path)
        answered = [r for r in rows if r.get("outcome") == "answered"]
        interrupted = [r for r in rows if r.get("outcome") == "interrupted"]
        assert len(answered) == len({r["key"] for r in answered}) == 12
        assert len(interrupted) <= 1
        assert len(provider.served) <= 13


def test_a_pool_that_is_wholly_down_abstains_and_offline_replay_agrees(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = prices(a_spec(a_teacher("a", "http://127.0.0.1:1"), a_teacher("b", "http://x")))
    states = [a_state(i) for i in range(8)]
    with FakeProvider(right, models) as provider:
        spec = a_spec(
            a_teacher("a", provider.openai_url, breaker_failures=3, breaker_cooldown_s=60.0),
            a_teacher("b", provider.url, "anthropic", breaker_failures=3),
            deadline_s=20.0,
        )

        async def up_and_down() -> tuple[list[PanelVerdict], list[PanelVerdict]]:
            async with pool_of(spec, path, 2) as pool:
                up = await ask_all(pool, states)
                provider.faults = FaultRates(server_error=1.0)
                return up, await ask_all(pool, [a_state(i) for i in range(100, 120)])

        up, down = asyncio.run(up_and_down())
    assert {v.reason for v in up} == {"pair"}
    assert {v.reason for v in down} == {"too_few_votes"}
    errors = Counter(vote.error for v in down for vote in v.votes)
    assert errors["circuit_open"] > 0
    assert errors.keys() == {"circuit_open", "http_500"}

    monkeypatch.delenv(KEY_ENV)  # the provider is gone too

    async def offline() -> list[PanelVerdict]:
        async with pool_of(spec, path, 1, offline=True) as pool:
            return await ask_all(pool, states)

    assert asyncio.run(offline()) == up


@pytest.mark.parametrize("mistake", ["no key", "no ledger"])
def test_a_user_s_mistake_ends_the_start_by_name(
    path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    spec = a_spec(a_teacher("a", "http://127.0.0.1:1"), quorum=1)
    monkeypatch.delenv(KEY_ENV)
    expected: type[ForgeError] = SpecError if mistake == "no key" else DataError

    async def start() -> None:
        async with pool_of(spec, path, 1, offline=mistake == "no ledger"):
            raise AssertionError("it started")

    with pytest.raises(expected, match=f"{KEY_ENV} must hold|no ledger to replay from"):
        asyncio.run(start())
