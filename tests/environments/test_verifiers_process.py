"""Real verifiers in a process of its own: rewards, errors, deadlines, and a worker that dies."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from episode_house import Students, conversation

from environments.channels import rl_samples
from environments.dialects import JSON
from environments.rollout import over_cartridge
from environments.verifiers_client import verifiers_episodes
from environments.verifiers_process import PYTHON, VerifiersWorker
from protocols.episodes import Episode, Task
from protocols.errors import DataError, RunError
from protocols.replay import Message
from protocols.types import Sampling

TASKSETS = Path(__file__).resolve().parents[1] / "tasksets"
TALK = conversation("with_tool_token")
HANGS = b"sleep\x008639.25"  # what the taskset starts when it is to hang
CALLS = ('{"arguments":{"number":4},"tool":"successor"}', "5", "6")


def script(member: int, turn: int) -> str:
    """After 4: 5, then 6. The second member miscounts."""
    return str(5 + turn * (1 + member))


def with_worker(use: Callable[[VerifiersWorker], Awaitable[None]], timeout_s: float = 120) -> None:
    if not PYTHON.exists():
        reason = "verifiers is not here: run `make install-verifiers`"
        if os.environ.get("FORGE_REQUIRE_VERIFIERS"):
            pytest.fail(reason)
        pytest.skip(reason)

    async def main() -> None:
        async with VerifiersWorker([TASKSETS], timeout_s) as worker:
            await use(worker)

    asyncio.run(asyncio.wait_for(main(), 250))


async def episodes(
    worker: VerifiersWorker, tasks: list[Task], say: Any = script, group: int = 2
) -> list[Episode]:
    return await verifiers_episodes(
        worker, tasks, Students(TALK, say), TALK, group_size=group, sampling=Sampling(),
        prefix=over_cartridge(3), seed_of=len, max_context=500, max_turns=5, dialect=JSON,
    )  # fmt: skip


def running(command: bytes) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if command in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def test_without_its_python_the_remedy_is_named() -> None:
    async def main() -> None:
        async with VerifiersWorker(python=Path("nowhere")):
            pass

    with pytest.raises(RunError, match="make install-verifiers"):
        asyncio.run(main())


@pytest.mark.mesh
def test_rewards_and_errors_of_a_taskset() -> None:
    async def use(worker: VerifiersWorker) -> None:
        name = "forge_numbers"
        tasks = await worker.tasks(name, {"numbers": [4, 9]}, most=5, document="desk_01")
        assert [t.id for t in tasks] == ["forge_numbers/0", "forge_numbers/1"]

        right, wrong, *other = await episodes(worker, tasks)
        assert [e.reward for e in (right, wrong, *other)] == [1.0, 0.0, 0.0, 0.0]
        assert right.opening.messages == (Message("user", "after 4?"),)
        assert [t.text.strip() for t in right.turns] == ["5", "6"]
        assert [t.text.strip() for t in wrong.turns] == ["5", "7"]
        assert right.turns[0].observation.messages == (Message("user", "and after that?"),)
        assert [s.reward for s in rl_samples([right, wrong])] == [1.0, 0.0]
        assert await episodes(worker, tasks) == [right, wrong, *other]

        for fault, why in (
            ("raise", "TaskError: task NumberTask scoring: ValueError: no rule for this"),
            ("exit", "SystemExit: no runtime here"),
        ):
            tasks = await worker.tasks(name, {"fault": fault}, most=1, document="desk_01")
            (failed,) = await episodes(worker, tasks, group=1)
            assert (failed.reward, failed.error_kind) == (None, "environment_refused")
            assert failed.turns[1].observation.error == f"environment_refused: {why}"

        tools = {"task": {"tools": True}}
        tasks = await worker.tasks(name, tools, most=1, document="desk_01")
        (called,) = await episodes(worker, tasks, lambda m, t: CALLS[t], group=1)
        assert [t.name for t in called.opening.tools] == ["successor"]
        assert called.turns[0].observation.messages == (Message("tool", "5"),)
        assert (called.reward, [t.branch for t in called.turns]) == (1.0, [0, 0, 0])

        with pytest.raises(DataError, match=r"gsm9k.*folder"):
            await worker.tasks("gsm9k", most=1)
        beyond = Task("x", "desk_01", {"taskset": name, "arguments": {}, "index": 7})
        (none,) = await episodes(worker, [beyond], group=1)
        assert "has 2 tasks, none of index 7" in none.opening.error
        outcome = await worker.play(
            Task("x", "desk_01", {**beyond.arguments, "index": 0}), "http://127.0.0.1:9/v1"
        )
        assert outcome.error.startswith("environment_refused: ProviderError")

    with_worker(use)


@pytest.mark.mesh
def test_deadlines_and_a_worker_that_is_killed() -> None:
    async def use(worker: VerifiersWorker) -> None:
        hanging = await worker.tasks("forge_numbers", {"fault": "hang"}, most=2, document="desk_01")
        pid = worker._process.pid if worker._process else 0
        killed = asyncio.create_task(episodes(worker, hanging))
        await until(lambda: len(running(HANGS)) == 4)
        os.kill(pid, signal.SIGKILL)
        for episode in await asyncio.wait_for(killed, 60):
            assert (episode.reward, episode.error_kind) == (None, "environment_died")
            assert "ended with -9" in episode.opening.error
        assert not running(HANGS)

        # The next rollouts have a new worker, and their deadline.
        worker._timeout_s = 2.0
        (late,) = await episodes(worker, hanging[:1], group=1)
        assert late.opening.error == "environment_died: no end within 2 s"
        assert not running(HANGS)
        worker._timeout_s = 60.0
        tasks = await worker.tasks("forge_numbers", most=1, document="desk_01")
        assert [e.reward for e in await episodes(worker, tasks)] == [1.0, 0.0]

        home = worker._home
        assert not (home / ".local").exists()  # where uv would have been installed

    with_worker(use)
    assert not running(b"verifiers_worker.py")
