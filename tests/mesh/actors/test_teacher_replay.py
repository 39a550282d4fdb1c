"""K actors and one purse: spawned by the service, over the official SDKs, on the local provider.
(In tests/nightly/actors the bills of a dollar's calls are lost with some answers.)"""

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
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
)
from rooms.actors.replay_pool_setup import BILLED, ask_all, pool_of, spend_a_dollar
from starlette.requests import Request
from starlette.responses import Response

from cartridge_forge.plugins.chat.messages import PanelVerdict
from cartridge_forge.plugins.replay.fake_provider.app import FakeProvider, FaultRates
from cartridge_forge.protocols.errors import DataError, ForgeError, SpecError


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_eight_actors_never_spend_more_than_a_dollar(path: Path) -> None:
    spend_a_dollar(path, BILLED, dear=3)


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
