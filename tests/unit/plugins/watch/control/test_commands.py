"""Run commands: what is requested at any time, and done between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_mesh import pool_of, run

from cartridge_forge.plugins.watch.control import commands as helm_module
from cartridge_forge.plugins.watch.control.commands import RunCommands
from cartridge_forge.protocols.errors import RunError, SpecError, StopRequested
from cartridge_forge.protocols.files import read_rows
from cartridge_forge.protocols.ports import TraceSpan
from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.protocols.records.status import RunStatus
from cartridge_forge.protocols.spec.services import AutoscaleSpec
from cartridge_forge.services.pool.pool import Pool
from cartridge_forge.services.run_directory import RunDirectory
from cartridge_forge.services.run_log import RunLog


class NoSink:
    def event(self, event: Any) -> None: ...
    def metric(self, row: MetricRow) -> None: ...
    def span(self, span: TraceSpan) -> None: ...
    def status(self, status: RunStatus) -> None: ...
    def close(self) -> None: ...


BOUND = "replicas must be >= 1 and <= 8 (control.max_replicas)"


class Steps:
    """A run of steps of one second each, steered by a commands. `written` are its checkpoints: the
    number of steps done, at each."""

    def __init__(self, path: Path, pools: dict[str, Pool] | None = None, name: str = "v") -> None:
        self.directory = RunDirectory.create(path, "tiny", "spec")
        self.now = RunStatus()
        self.done = 0
        self.written: list[int] = []
        self.name = name
        self.recorder = RunLog(self.directory, NoSink())
        self.pools = pools or {}
        self.commands = RunCommands(
            lambda: self.now, self.show, lambda: self.pools, self.recorder, self.scale, 8
        )

    async def scale(self, role: str, replicas: int) -> None:
        self.pools[role].scale(replicas)

    def show(self, **changes: Any) -> None:
        self.now = replace(self.now, **changes)

    async def checkpoint(self) -> str:
        await asyncio.sleep(0.25)
        self.written.append(self.done)
        return f"{self.name}{self.done}" if self.name else ""

    async def run(self, steps: int) -> str:
        try:
            for _ in range(steps):
                await self.commands.between_steps(self.checkpoint)
                await asyncio.sleep(1.0)
                self.done += 1
            return "finished"
        except StopRequested:
            return "stopped"
        finally:
            self.show(done=True, stage="over")
            self.commands.over()

    def events(self) -> list[str]:
        return [row["event"] for row in read_rows(self.directory.events)]


Scenario = Callable[[Steps], Awaitable[None]]


def steered(path: Path, scenario: Scenario, steps: int = 6, **options: Any) -> Steps:
    async def whole() -> Steps:
        world = Steps(path, **options)
        going = asyncio.create_task(world.run(steps))
        await asyncio.sleep(0.5)  # in the middle of the first step
        await scenario(world)
        await going
        return world

    world: Steps = run(whole())
    return world


# -- scale --------------------------------------------------------------------------------------


@pytest.fixture
def pools() -> dict[str, Pool]:
    limits = AutoscaleSpec(min=1, max=4)
    built = {
        role: Pool(role, pool_of(**spec).spec, 10.0)
        for role, spec in {
            "generator": {"replicas": 2},
            "doc_teacher": {"replicas": 2, "autoscale": limits},
            "trainer": {},
            "store": {},
        }.items()
    }
    return built


@pytest.mark.parametrize(
    ("role", "replicas", "message"),
    [
        ("actor", 2, "no pool 'actor'; this run has doc_teacher, generator, store, trainer"),
        ("trainer", 2, "trainer cannot be scaled: there is one of it in a run"),
        ("store", 1, "store cannot be scaled: there is one of it in a run"),
        ("generator", 0, f"{BOUND}: got 0 for generator"),
        ("generator", -3, f"{BOUND}: got -3 for generator"),
        ("generator", 9, f"{BOUND}: got 9 for generator"),
        (
            "doc_teacher", 5,
            "replicas of doc_teacher must be within roles.doc_teacher.autoscale (1 to 4): got 5; "
            "its load decides within them",
        ),
    ],
)  # fmt: skip
def test_a_scaling_that_cannot_be(
    tmp_path: Path, pools: dict[str, Pool], role: str, replicas: int, message: str
) -> None:
    async def scenario() -> None:
        world = Steps(tmp_path, pools)
        with pytest.raises(SpecError) as caught:
            await world.commands.scale(role, replicas)
        assert str(caught.value) == message
        assert [p.target for p in pools.values()] == [2, 2, 1, 1]
        assert world.events() == []

    run(scenario())


def test_scaling_sets_the_target_and_says_so_once(tmp_path: Path, pools: dict[str, Pool]) -> None:
    async def scenario() -> None:
        world = Steps(tmp_path, pools)
        resized: list[int] = []
        pools["generator"].resize = lambda pool: resized.append(pool.target)
        for replicas in (5, 5, 1):
            assert (await world.commands.scale("generator", replicas)).target == replicas
        assert (await world.commands.scale("doc_teacher", 4)).target == 4, "a limit is within"
        assert resized == [5, 1]
        told = [(e["role"], e["before"], e["replicas"], e["by"])
                for e in read_rows(world.directory.events)]  # fmt: skip
        assert told == [
            ("generator", 2, 5, "hand"), ("generator", 5, 1, "hand"), ("doc_teacher", 2, 4, "hand"),
        ]  # fmt: skip

    run(scenario())


def test_before_the_mesh_there_is_nothing_to_scale(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(SpecError, match="no pool 'generator'; this run has none"):
            await Steps(tmp_path).commands.scale("generator", 2)

    run(scenario())


# -- between steps ------------------------------------------------------------------------------


def test_a_pause_begins_after_the_step_and_ends_when_asked(tmp_path: Path) -> None:
    async def scenario(world: Steps) -> None:
        await world.commands.pause()
        await world.commands.pause()  # asked twice is asked once
        assert world.now.message == "pausing after this step"
        assert not world.now.paused
        await asyncio.sleep(5.0)
        assert (world.done, world.now.paused, world.now.message) == (1, True, "paused")
        await world.commands.resume()
        await world.commands.resume()
        await asyncio.sleep(0.1)
        assert (world.now.paused, world.now.message) == (False, "")

    world = steered(tmp_path, scenario)
    assert world.done == 6
    assert world.events() == ["paused", "resumed"]


def test_a_pause_taken_back_within_the_step_is_none(tmp_path: Path) -> None:
    async def scenario(world: Steps) -> None:
        await world.commands.pause()
        await world.commands.resume()
        assert world.now.message == ""

    world = steered(tmp_path, scenario)
    assert (world.done, world.events()) == (6, [])


def test_a_stop_ends_it_after_the_step(tmp_path: Path) -> None:
    async def scenario(world: Steps) -> None:
        await world.commands.stop()
        assert world.now.message == "stopping after this step"

    assert steered(tmp_path, scenario).done == 1


def test_a_paused_run_can_be_stopped(tmp_path: Path) -> None:
    async def scenario(world: Steps) -> None:
        await world.commands.pause()
        await asyncio.sleep(2.0)
        await world.commands.stop()

    world = steered(tmp_path, scenario)
    assert (world.done, world.now.paused) == (1, False)


def test_a_stop_from_before_the_first_step(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = Steps(tmp_path)
        await world.commands.stop()
        assert await world.run(3) == "stopped"
        assert world.done == 0

    run(scenario())


def test_a_checkpoint_is_written_after_the_step_for_all_who_asked(tmp_path: Path) -> None:
    async def scenario(world: Steps) -> None:
        names = await asyncio.gather(world.commands.checkpoint(), world.commands.checkpoint())
        assert names == ["v1", "v1"]
        assert await world.commands.checkpoint() == "v2"

    world = steered(tmp_path, scenario)
    assert (world.done, world.written) == (6, [1, 2])


def test_a_checkpoint_while_it_is_paused_and_the_pause_goes_on(tmp_path: Path) -> None:
    async def scenario(world: Steps) -> None:
        await world.commands.pause()
        await asyncio.sleep(2.0)
        for _ in range(2):
            assert await asyncio.wait_for(world.commands.checkpoint(), 1.0) == "v1"
        await asyncio.sleep(5.0)
        assert (world.done, world.now.paused) == (1, True)
        await world.commands.resume()

    assert steered(tmp_path, scenario).written == [1, 1]


def test_nothing_to_keep_yet(tmp_path: Path) -> None:
    async def scenario(world: Steps) -> None:
        with pytest.raises(RunError, match=r"^nothing is trained yet: nothing to keep$"):
            await world.commands.checkpoint()

    assert steered(tmp_path, scenario, name="").done == 6


def test_the_run_ends_before_the_checkpoint(tmp_path: Path) -> None:
    async def scenario(world: Steps) -> None:
        asked = asyncio.create_task(world.commands.checkpoint())
        with pytest.raises(RunError, match=r"^the run ended before the checkpoint was written$"):
            await asked

    assert steered(tmp_path, scenario, steps=1).written == []


def test_a_checkpoint_that_fails_is_the_run_s_failure_and_its_asker_s(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = Steps(tmp_path)

        async def full() -> str:
            raise OSError("no space left")

        world.checkpoint = full  # type: ignore[method-assign]
        asked = asyncio.create_task(world.commands.checkpoint())
        await asyncio.sleep(0)
        with pytest.raises(OSError, match="no space left"):
            await world.run(3)
        with pytest.raises(RunError, match=r"the checkpoint was not written: OSError\('no space"):
            await asked

    run(scenario())


def test_a_caller_that_goes_away_is_not_answered(tmp_path: Path) -> None:
    async def scenario(world: Steps) -> None:
        gone = asyncio.create_task(world.commands.checkpoint())
        await asyncio.sleep(0.1)
        gone.cancel()
        assert await world.commands.checkpoint() == "v1"

    assert steered(tmp_path, scenario).done == 6


def test_a_checkpoint_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helm_module, "CHECKPOINT_SECONDS", 0.1)

    async def scenario(world: Steps) -> None:
        with pytest.raises(RunError, match=r"^no checkpoint within 0\.1 s; is it stalled\?$"):
            await world.commands.checkpoint()

    assert steered(tmp_path, scenario).done == 6


@pytest.mark.parametrize("what", ["pause", "resume", "checkpoint"])
def test_when_it_is_over_nothing_can_be_asked(tmp_path: Path, what: str) -> None:
    async def scenario() -> None:
        world = Steps(tmp_path)
        assert await world.run(1) == "finished"
        with pytest.raises(RunError, match=rf"^cannot {what}: the run has ended \(over\)$"):
            await getattr(world.commands, what)()
        await world.commands.stop()  # that it has done already
        assert world.now.message == ""

    run(scenario())
