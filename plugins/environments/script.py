"""Play tasks whose messages are written down: a conversation in which the user and the tools say
the same whatever the student answers.

All that it needs is in the task's arguments, so any replica plays any episode. The episode ends
after its last turn and without a reward, which the rules of its handbook give.
"""

from __future__ import annotations

from collections.abc import Sequence

from cartridge_forge.plugins.chat.episodes import EnvironmentRequest, Observation
from cartridge_forge.plugins.chat.messages import AgentMessage

SCRIPT = "script"  # the argument of a task: of each turn its role, its text, and whether it is new


def scripted(move: EnvironmentRequest) -> Observation:
    """Return the first message for a reset, the next after an action, and the end after the last
    action."""
    script = move.task.arguments[SCRIPT]
    played = len(move.actions)
    if played >= len(script):
        return Observation(done=True)
    role, text, new = script[played]
    message = AgentMessage(role, text)
    return Observation((message,), new_conversation=bool(new) and played > 0)


async def play_script(moves: Sequence[EnvironmentRequest]) -> list[Observation]:
    """Return the observation of each move; there is nothing to wait for."""
    return [scripted(move) for move in moves]
