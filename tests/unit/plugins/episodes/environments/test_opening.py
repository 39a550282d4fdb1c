"""A burst of episodes meets a server no harder than its bound."""

import asyncio

import pytest

from cartridge_forge.plugins.episodes.environments import opening
from cartridge_forge.plugins.episodes.spec.environment import EnvironmentSpec
from cartridge_forge.protocols.episodes import EnvironmentRequest, Observation, Task


class Counting:
    """Count the moves under way."""

    def __init__(self, *_: object) -> None:
        self.under_way = self.most = 0

    async def move(self, move: EnvironmentRequest) -> Observation:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        return Observation(done=True, reward=float(move.task.id))


@pytest.mark.parametrize(("at_once", "most"), [(2, 2), (9, 6)])
def test_moves_beyond_the_bound_wait_and_are_answered(
    at_once: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Counting()
    monkeypatch.setattr(opening, "environment_of", lambda *_: environment)
    several = opening.SeveralEnvironments((EnvironmentSpec(kind="desk"),), 8, at_once)

    async def burst() -> list[Observation]:
        tasks = [EnvironmentRequest(Task(str(i), "d", {}), ()) for i in range(6)]
        return await asyncio.gather(*map(several.move, tasks))

    assert [o.reward for o in asyncio.run(burst())] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert environment.most == most
