"""What counts as progress: tokens, and not only calls that were answered."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cartridge_forge.plugins.watch.telemetry import watchdog
from cartridge_forge.protocols.records.status import ReplicaState, RunStatus
from cartridge_forge.protocols.spec.services import WatchdogSpec
from cartridge_forge.services.pool.health import HealthState
from cartridge_forge.services.pool.pool import RequestStatus


class Log:
    """Counts as a RunLog does, and keeps the events."""

    def __init__(self) -> None:
        self.moved = 0
        self.told: list[str] = []
        self.came = asyncio.Event()

    def status(self, status: RunStatus) -> None:
        pass

    def event(self, name: str, **facts: Any) -> None:
        self.moved += 1
        self.told.append(name)
        self.came.set()


async def tells_of_a_stall(log: Log, watching: asyncio.Task[None]) -> None:
    async with asyncio.timeout(60):
        await log.came.wait()
    assert log.told == ["stalled"]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


def test_a_slow_first_answer_is_no_stall_and_silence_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "local_processes", lambda pools: {})
    process = SimpleNamespace(work=0)
    replica = SimpleNamespace(
        process=process, life=HealthState(ReplicaState.HEALTHY), state=ReplicaState.HEALTHY
    )
    pools: Any = {"generator": SimpleNamespace(replicas=[replica], in_flight={})}
    log: Any = Log()

    async def run() -> None:
        watching = asyncio.create_task(
            watchdog.watch(
                lambda: RunStatus(stage="here", phase="rollout"), lambda **shown: None, log, pools,
                WatchdogSpec(stall_s=0.5), tmp_path,
            )
        )  # fmt: skip
        for _ in range(100):  # a second of a call that nobody has answered yet
            process.work += 17
            await asyncio.sleep(0.01)
        assert log.told == []
        await tells_of_a_stall(log, watching)

    asyncio.run(run())


def test_a_replica_that_starts_may_be_silent_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that compiles answers nothing for minutes: its start has a time-out of its own, and
    half of it is no stall."""
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "local_processes", lambda pools: {})
    life = HealthState(ReplicaState.HEALTHY)
    replica = SimpleNamespace(process=SimpleNamespace(work=0), life=life, state=life.state)
    start = RequestStatus("its start", "ready", 0.0, "generator[0]", 1)
    pool = SimpleNamespace(replicas=[replica], in_flight={"start": start})
    log: Any = Log()

    async def run() -> None:
        watching = asyncio.create_task(
            watchdog.watch(
                lambda: RunStatus(stage="starting the mesh"), lambda **shown: None, log,
                {"generator": cast(Any, pool)}, WatchdogSpec(stall_s=0.1), tmp_path, start_s=60.0,
            )
        )  # fmt: skip
        await asyncio.sleep(0.5)
        assert log.told == []
        pool.in_flight.clear()  # it has started; the silence is now the run's own
        await tells_of_a_stall(log, watching)

    asyncio.run(run())
