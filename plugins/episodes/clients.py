"""Call the roles that play and judge episodes: environments and rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cartridge_forge.plugins.chat.episodes import (
    EnvironmentReply,
    EnvironmentRequest,
    Observation,
    RewardOutcome,
    RewardReply,
)
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.services.clients import RoleClient


class EnvironmentClient(RoleClient):
    """Execute the moves of episodes."""

    role = "environment"

    async def move(self, moves: Sequence[EnvironmentRequest]) -> list[Observation]:
        """Return one observation for each move, in order. When a share of the moves is lost with
        its replica in every attempt, its episodes end with the error "environment_died"."""

        async def share(requests: Sequence[EnvironmentRequest]) -> list[Observation]:
            try:
                reply: EnvironmentReply = await self.pool.route("move", tuple(requests))
            except RunError as error:  # the other episodes, and the run, continue
                return [Observation(done=True, error=f"environment_died: {error}")] * len(requests)
            return list(reply.observations)

        return await self.pool.split(moves, share)


class RewardClient(RoleClient):
    """Judge finished episodes by the rewards of workers."""

    role = "reward"

    async def outcomes(self, views: Sequence[Mapping[str, Any]]) -> list[dict[str, RewardOutcome]]:
        """Return what each reward gives each episode, by name, in order. When a share is lost with
        its replica in every attempt, all rewards of its episodes have failed, under the name ""."""

        async def share(views_share: Sequence[Mapping[str, Any]]) -> list[dict[str, RewardOutcome]]:
            try:
                reply: RewardReply = await self.pool.route("outcomes", tuple(views_share))
            except RunError as error:  # the other episodes, and the run, continue
                return [{"": RewardOutcome(None, f"reward_died: {error}", failed=True)}] * len(
                    views_share
                )
            return list(reply.outcomes)

        return await self.pool.split(views, share)
