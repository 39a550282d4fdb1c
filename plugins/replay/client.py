"""Call the role that asks external teachers."""

from __future__ import annotations

from cartridge_forge.plugins.chat.messages import PanelVerdict, ReplayState
from cartridge_forge.services.clients import RoleClient


class TeacherReplayClient(RoleClient):
    """Ask external teachers about states."""

    role = "teacher_replay"

    async def vote(self, state: ReplayState) -> PanelVerdict:
        """Return the verdict of the teacher panel on a state."""
        verdict: PanelVerdict = await self.pool.route("vote", state)
        return verdict

    async def hint(
        self, teacher: str, state: ReplayState, request: str, timeout_s: float
    ) -> tuple[str, str]:
        """Return (hint, "") by the named teacher for a state whose last message reports a failure,
        or ("", why) when there is none after `timeout_s`."""
        hint: tuple[str, str] = await self.pool.route("hint", teacher, state, request, timeout_s)
        return hint

    async def score(
        self, teacher: str, state: ReplayState, rubric: str, reference: str, timeout_s: float
    ) -> tuple[float | None, str]:
        """Return (number from 0 to 1, "") that the named teacher, as a judge, gives the last
        message of a state, or (None, why) when there is none after `timeout_s`."""
        score: tuple[float | None, str] = await self.pool.route(
            "score", teacher, state, rubric, reference, timeout_s
        )
        return score
