"""A process of its own that uses a ledger, for tests that kill it or let several race.

python replay_worker.py ask LEDGER URL COUNT     vote on COUNT states, say each when it is done
python replay_worker.py race LEDGER COUNT        reserve and settle COUNT calls, as fast as it goes
python replay_worker.py hold LEDGER              reserve one call, say so, and stand still
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from replay_setup import KEY, KEY_ENV, a_spec, a_state, a_teacher

from cartridge_forge.plugins.chat.messages import TeacherUsage
from cartridge_forge.plugins.replay.budget import ANSWERED, CallNow, SettledCall, TeacherCall
from cartridge_forge.plugins.replay.ledger import SpendLedger
from cartridge_forge.plugins.replay.panel import TeacherPanel, ask_teachers, limits_of

RACE_CAP = 0.0005  # dollars: 500,000 nanodollars
RACE_WORST, RACE_PAID = 10_000, 3_000


def ask(path: str, url: str, count: int) -> None:
    from cartridge_forge.plugins.replay.clients import (
        connect,  # the SDKs take a second to import; not all need them
    )

    os.environ[KEY_ENV] = KEY
    spec = a_spec(a_teacher("a", url), quorum=1)
    ledger = SpendLedger(Path(path), limits_of(spec))
    desk = TeacherPanel(spec, ledger, "run", {t.name: connect(t) for t in spec.teachers})

    async def one(number: int, turns: asyncio.Semaphore) -> None:
        async with turns:
            verdict = await ask_teachers(desk, a_state(number))
            sys.stdout.write(f"{number} {verdict.reason}\n")
            sys.stdout.flush()

    async def all_of_them() -> None:
        turns = asyncio.Semaphore(3)
        await asyncio.gather(*(one(number, turns) for number in range(count)))
        await desk.close()

    asyncio.run(all_of_them())


def race(path: str, count: int) -> None:
    spec = a_spec(a_teacher("a", "http://127.0.0.1:1", concurrency=10_000), cap=RACE_CAP)
    ledger = SpendLedger(Path(path), limits_of(spec))
    done = 0
    for i in range(count):
        call = TeacherCall(f"{os.getpid()}/{i}", "a", "run", RACE_WORST)
        admission = ledger.admit(call)
        if isinstance(admission, CallNow):
            ledger.settle(a_settlement(call, admission.attempt, RACE_PAID))
            done += 1
    sys.stdout.write(f"{done}\n")
    ledger.close()


def hold(path: str) -> None:
    spec = a_spec(a_teacher("a", "http://127.0.0.1:1"))
    admission = SpendLedger(Path(path), limits_of(spec)).admit(TeacherCall("k", "a", "run", 5_000))
    sys.stdout.write(f"{type(admission).__name__}\n")
    sys.stdout.flush()
    time.sleep(60)


def a_settlement(call: TeacherCall, attempt: str, nanodollars: int, **other: object) -> SettledCall:
    row = SettledCall(
        attempt, call.key, call.teacher, call.run, ANSWERED, nanodollars, TeacherUsage(1, 1), "raw",
        False, True, 0.1, 1, 0.0, time.time(),
    )  # fmt: skip
    return replace(row, **other)  # type: ignore[arg-type]


if __name__ == "__main__":
    command, ledger_path, *rest = sys.argv[1:]
    if command == "ask":
        ask(ledger_path, rest[0], int(rest[1]))
    elif command == "race":
        race(ledger_path, int(rest[0]))
    else:
        hold(ledger_path)
