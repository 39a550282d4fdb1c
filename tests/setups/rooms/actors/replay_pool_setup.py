"""Pools of actors that ask teachers out of one purse, and what eight of them spend of a dollar."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from monarch.actor import this_host
from replay_setup import (
    KEY,
    KEY_ENV,
    a_spec,
    a_state,
    a_teacher,
    canonical_read,
    ledger_rows,
    right,
    wrong,
)

from cartridge_forge.actors.teacher_replay import TeacherReplayActor
from cartridge_forge.plugins.chat.messages import NANO, PanelVerdict, ReplayState
from cartridge_forge.plugins.replay.fake_provider.app import (
    FakeProvider,
    FaultRates,
    sometimes_right,
)
from cartridge_forge.plugins.replay.spec import PriceSpec, ReplaySpec
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.services.pool.pool import Pool
from cartridge_forge.services.pool.service import Service

ONE_AT_A_TIME = RoleSpec(max_ongoing=1)


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


def spend_a_dollar(path: Path, faults: FaultRates, dear: int) -> None:
    """Eight actors at a provider that answers slowly and errs 20% of the time, with more states
    than a dollar pays, never spend more than it."""
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
