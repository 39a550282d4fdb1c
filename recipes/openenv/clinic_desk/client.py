"""Talk to a server of the clinic desk.

with ClinicDeskEnv(base_url="http://127.0.0.1:8000").sync() as desk:
    seen = desk.reset(seed=4711, desk_seed=1, desk=3)
    seen = desk.step(DeskAction(text="find surgeon in cardiology."))
"""

from __future__ import annotations

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult

from recipes.openenv.clinic_desk.models import DeskAction, DeskObservation, DeskState


class ClinicDeskEnv(EnvClient[DeskAction, DeskObservation, DeskState]):
    """Play one episode at a time over a session of its own."""

    def _step_payload(self, action: DeskAction) -> dict[str, Any]:
        return {"text": action.text}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[DeskObservation]:
        fields = dict(payload.get("observation") or {})
        is_done, reward = bool(payload.get("done")), payload.get("reward")
        metadata = payload.get("metadata") or fields.pop("metadata", None) or {}
        observation = DeskObservation(
            messages=fields.get("messages", []),
            tools=fields.get("tools", []),
            done=is_done,
            reward=reward,
            metadata=metadata,
        )
        return StepResult(observation=observation, reward=reward, done=is_done, metadata=metadata)

    def _parse_state(self, payload: dict[str, Any]) -> DeskState:
        return DeskState(**payload)
