"""Real verifiers in a process of its own: rewards, errors, deadlines, and a worker that dies."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from episode_setup import Students, conversation

from environments.action_parsing import JSON
from environments.rollout import over_cartridge
from environments.training_signals import rl_samples
from environments.verifiers.episodes import verifiers_episodes
from environments.verifiers.worker_process import PYTHON, VerifiersWorker
from protocols.episodes import Episode, Task
from protocols.errors import DataError
from protocols.teacher_replay import AgentMessage
from protocols.types import Sampling

TASKSETS = Path(__file__).resolve().parents[3] / "data/tasksets"

TALK = conversation("with_tool_token")

HANGS = b"sleep\x008639.25"  # what the taskset starts when it is to hang

CALLS = ('{"arguments":{"number":4},"tool":"successor"}', "5", "6")

T = TypeVar("T")


def script(member: int, turn: int) -> str:
    """After 4: 5, then 6. The second member miscounts."""
    return str(5 + turn * (1 + member))


class Verifiers:
    """A worker, and the event loop that it lives in."""

    def __init__(self, runner: asyncio.Runner, worker: VerifiersWorker) -> None:
        self.worker, self._runner = worker, runner

    def run(self, wanted: Awaitable[T]) -> T:
        async def bounded() -> T:
            return await asyncio.wait_for(wanted, 120)

        return self._runner.run(bounded())

    def tasks(self, arguments: dict[str, Any], most: int = 1) -> list[Task]:
        wanted = self.worker.tasks("forge_numbers", arguments, most=most, document="desk_01")
        return self.run(wanted)

    def episodes(self, tasks: list[Task], say: Any = script, group: int = 2) -> list[Episode]:
        return self.run(
            verifiers_episodes(
                self.worker, tasks, Students(TALK, say), TALK, group_size=group,
                sampling=Sampling(), prefix=over_cartridge(3), seed_of=len, max_context=500,
                max_turns=5, dialect=JSON,
            )
        )  # fmt: skip


@pytest.fixture(scope="module")
def verifiers() -> Iterator[Verifiers]:
    if not PYTHON.exists():
        reason = "verifiers is not here: run `make install-verifiers`"
        if os.environ.get("FORGE_REQUIRE_VERIFIERS"):
            pytest.fail(reason)
        pytest.skip(reason)
    with asyncio.Runner() as runner:
        worker = VerifiersWorker([TASKSETS], timeout_s=90)
        runner.run(worker.__aenter__())
        yield Verifiers(runner, worker)
        home = worker._home
        installed = (home / ".local").exists()  # where uv would be
        runner.run(worker.__aexit__(None, None, None))
        assert [installed, home.exists()] == [False, False]
    assert not running(b"verifiers_worker.py")


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


def test_rewards_of_two_turns(verifiers: Verifiers) -> None:
    tasks = verifiers.tasks({"numbers": [4, 9]}, most=5)
    assert [t.id for t in tasks] == ["forge_numbers/0", "forge_numbers/1"]
    right, wrong, *others = verifiers.episodes(tasks)
    assert [e.reward for e in (right, wrong, *others)] == [1.0, 0.0, 0.0, 0.0]
    assert right.opening.messages == (AgentMessage("user", "after 4?"),)
    assert right.turns[0].observation.messages == (AgentMessage("user", "and after that?"),)
    assert [t.text.strip() for t in right.turns] == ["5", "6"]
    assert [t.text.strip() for t in wrong.turns] == ["5", "7"]
    assert [s.reward for s in rl_samples([right, wrong])] == [1.0, 0.0]
    assert verifiers.episodes(tasks) == [right, wrong, *others]


def test_calls_reach_the_taskset_s_tools(verifiers: Verifiers) -> None:
    tasks = verifiers.tasks({"task": {"tools": True}})
    (episode,) = verifiers.episodes(tasks, lambda member, turn: CALLS[turn], group=1)
    assert [t.name for t in episode.opening.tools] == ["successor"]
    assert episode.turns[0].observation.messages == (AgentMessage("tool", "5"),)
    assert (episode.reward, [t.branch for t in episode.turns]) == (1.0, [0, 0, 0])


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("raise", "TaskError: task NumberTask scoring: ValueError: no rule for this"),
        ("exit", "SystemExit: no runtime here"),
    ],
)
def test_what_a_taskset_raises_costs_the_reward(verifiers: Verifiers, fault: str, why: str) -> None:
    (episode,) = verifiers.episodes(verifiers.tasks({"fault": fault}), group=1)
    assert (episode.reward, episode.error_kind) == (None, "environment_refused")
    assert [t.text.strip() for t in episode.turns] == ["5", "6"]
    assert episode.turns[1].observation.error == f"environment_refused: {why}"


def test_what_cannot_be_played_is_named(verifiers: Verifiers) -> None:
    with pytest.raises(DataError, match=r"gsm9k.*folder"):
        verifiers.run(verifiers.worker.tasks("gsm9k", most=1))
    with pytest.raises(DataError, match="forge_pair has the agents left, right; only one"):
        verifiers.run(verifiers.worker.tasks("forge_pair", most=1))
    first = Task("x", "desk_01", {"taskset": "forge_numbers", "arguments": {}, "index": 0})
    beyond = Task("x", "desk_01", {**first.arguments, "index": 7})
    (episode,) = verifiers.episodes([beyond], group=1)
    assert "has 2 tasks, none of index 7" in episode.opening.error
    outcome = verifiers.run(verifiers.worker.play(first, "http://127.0.0.1:9/v1"))
    assert outcome.error.startswith("environment_refused: ProviderError")


def test_a_rollout_ends_at_its_deadline(
    verifiers: Verifiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = verifiers.tasks({"fault": "hang"})
    monkeypatch.setattr(verifiers.worker, "_timeout_s", 1.0)
    (episode,) = verifiers.episodes(tasks, group=1)
    assert episode.opening.error == "environment_died: no end within 1 s"
    verifiers.run(until(lambda: not running(HANGS)))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_dies_costs_the_rewards(verifiers: Verifiers, how: signal.Signals) -> None:
    tasks = verifiers.tasks({"fault": "hang"}, most=2)

    async def killed() -> None:
        await until(lambda: len(running(HANGS)) == 4)
        assert verifiers.worker._process is not None
        os.kill(verifiers.worker._process.pid, how)

    async def both() -> list[Episode]:
        killing = asyncio.create_task(killed())
        episodes = await verifiers_episodes(
            verifiers.worker, tasks, Students(TALK, script), TALK, group_size=2,
            sampling=Sampling(), prefix=over_cartridge(3), seed_of=len, max_context=500,
            max_turns=5,
        )  # fmt: skip
        await killing
        await until(lambda: not running(HANGS))
        return episodes

    episodes = verifiers.run(both())
    assert [(e.reward, e.error_kind) for e in episodes] == [(None, "environment_died")] * 4
    if how == signal.SIGKILL:
        assert "it ended with -9" in episodes[0].opening.error
        # The next rollouts have a worker again.
        assert [e.reward for e in verifiers.episodes(verifiers.tasks({}))] == [1.0, 0.0]
