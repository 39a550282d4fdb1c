"""A probe beside the next step: when it is asked, when its row is written, and when it is not."""

from __future__ import annotations

import asyncio

import pytest

from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.training.loop import OverlappedValidation


def row(version: int) -> MetricRow:
    return MetricRow(
        arm="on_policy", step=version, version=version, kl=0.1, grad_norm=1.0, lr=0.1, tokens=5,
        stale_tokens=0,
    )  # fmt: skip


class House:
    """Answers when `gate` is open; `asked` are versions, `told` what was written."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.asked: list[int] = []
        self.told: list[tuple[int, float | None]] = []
        self.fault: Exception | None = None
        self.probe = OverlappedValidation(
            self.measure, lambda r: self.told.append((r.version, r.accuracy))
        )

    def tell(self, row: MetricRow) -> None:
        self.told.append((row.version, row.accuracy))

    async def measure(self, version: int) -> float:
        self.asked.append(version)
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        return version / 10


def test_it_runs_beside_whatever_is_done_until_it_is_settled() -> None:
    async def story() -> House:
        house = House()
        house.probe.hold(row(3))
        await asyncio.sleep(0)
        assert house.asked == [], "the rollout comes first"
        house.probe.begin()
        house.probe.begin()
        await asyncio.sleep(0)
        assert (house.asked, house.told) == ([3], [])
        house.gate.set()
        await house.probe.settled()
        await house.probe.settled()
        house.probe.hold(row(6))
        await house.probe.settled()  # by a checkpoint, before anything began
        return house

    house = asyncio.run(story())
    assert house.asked == [3, 6]
    assert house.told == [(3, 0.3), (6, 0.6)]


def test_without_a_row_nothing_is_asked() -> None:
    async def story() -> House:
        house = House()
        house.probe.begin()
        await house.probe.settled()
        return house

    house = asyncio.run(story())
    assert (house.asked, house.told) == ([], [])


def test_a_probe_that_fails_writes_no_row_however_often_it_is_waited_for() -> None:
    async def story() -> House:
        house = House()
        house.fault = RunError("generator lost")
        house.gate.set()
        house.probe.hold(row(3))
        for _ in range(2):
            with pytest.raises(RunError, match="generator lost"):
                await house.probe.settled()
        return house

    assert asyncio.run(story()).told == []


def test_one_that_was_cancelled_with_its_step_is_asked_again_for_the_last_checkpoint() -> None:
    async def story() -> House:
        house = House()
        house.probe.hold(row(3))
        step = asyncio.create_task(house.probe.settled())
        await asyncio.sleep(0.01)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        house.gate.set()
        await house.probe.settled()
        return house

    house = asyncio.run(story())
    assert (house.asked, house.told) == ([3, 3], [(3, 0.3)])
