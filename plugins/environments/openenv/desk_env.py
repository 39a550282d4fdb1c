"""Offer the clinic desk as an OpenEnv environment with `reset`, `step` and `state`.

    env = DeskEnvironment()
    env.reset(seed=4711, desk_seed=1, desk=3, fields=4, max_turns=8)   # "what is the surgeon?"
    env.step(DeskAction(text="find surgeon in cardiology."))           # "note 17."

An episode is determined by its arguments and actions: `reset(..., replay_actions=[...])` returns
the observation that the last of these actions gave before. The tools read only the case, no file
and no network; a call that is too long is bad_arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

from cartridge_forge.plugins.clinic.desk import (
    TOOLS,
    DeskCase,
    DeskReply,
    ShiftState,
    bounded,
    draw_desk,
    draw_shift,
    reply_in_shift,
)
from cartridge_forge.protocols.errors import DataError, RunError


class DeskAction(Action):
    """Carry the clerk's text: `DeskAction(text="read note 17.")`."""

    text: str


class DeskObservation(Observation):
    """Carry the messages that the clerk reads next; `tools` are set at the opening only.

    `metadata` is {"error_kind", "hint_template_key", "hint_facts"}, "expected" when done unless a
    case before was wrong, and "new_conversation" where the last message begins another case.
    """

    messages: list[dict[str, str]] = Field(default_factory=list)
    tools: list[dict[str, Any]] = Field(default_factory=list)


class DeskState(State):
    """Hold the case so far: `history` is all messages, `actions` the clerk's texts among them."""

    history: list[dict[str, str]] = Field(default_factory=list)
    actions: list[str] = Field(default_factory=list)


class DeskEnvironment(Environment[DeskAction, DeskObservation, DeskState]):
    """Play one case at a time in one session; sessions share nothing."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._cases: tuple[DeskCase, ...] = ()
        self._case_turns = 0
        self._shift = ShiftState()
        self._state = DeskState()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        desk_seed: int = 0,
        desk: int = 1,
        fields: int = 4,
        max_turns: int = 8,
        cases: int = 1,
        replay_actions: Sequence[str] = (),
        **_: Any,
    ) -> DeskObservation:
        """Open case `seed`, or a shift of `cases`, of desk `desk` (from 1) of `desk_seed`, and
        return the question. A case has at most max_turns // cases turns. Raises DataError for
        invalid numbers."""
        self._cases = draw_shift(draw_desk(desk_seed, desk, fields), seed or 0, cases)
        if max_turns < cases:
            raise DataError(
                f"max_turns must be >= {cases}, a turn a case: got {max_turns}; set it to that or "
                "more"
            )
        self._shift, self._case_turns = ShiftState(), max_turns // cases
        question = {"role": "user", "content": self._cases[0].question}
        self._state = DeskState(episode_id=episode_id, history=[question])
        tools = [asdict(tool) for tool in TOOLS]
        observation = DeskObservation(
            messages=[question], tools=tools, metadata=_metadata(DeskReply(""))
        )
        for text in replay_actions:
            observation = self.step(DeskAction(text=text))
        return observation

    def step(self, action: DeskAction, timeout_s: float | None = None, **_: Any) -> DeskObservation:
        """Return the desk's reply to one call. Raises RunError without an open case."""
        shift = self._shift
        if not self._cases or shift.ended == len(self._cases):
            raise RunError("there is no open case; reset first")
        text = bounded(action.text)
        self._shift = reply_in_shift(self._cases, shift, text, self._case_turns)
        reply = self._shift.reply
        assert reply is not None
        # After a wrong case the last answer does not decide the reward.
        decides = reply.done and shift.right == shift.ended
        message = {"role": "assistant", "content": action.text}
        answer = [{"role": "tool", "content": reply.text}]
        if reply.question:
            answer.append({"role": "user", "content": reply.question})
        self._state = DeskState(
            episode_id=self._state.episode_id,
            step_count=len(self._state.actions) + 1,
            history=[*self._state.history, message, *answer],
            actions=[*self._state.actions, action.text],
        )
        return DeskObservation(
            messages=answer,
            done=reply.done,
            reward=reply.reward,
            metadata=_metadata(reply, self._cases[shift.ended].value if decides else None),
        )

    @property
    def state(self) -> DeskState:
        return self._state


def _metadata(reply: DeskReply, expected: str | None = None) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "error_kind": reply.error_kind,
        "hint_template_key": reply.hint_key,
        "hint_facts": dict(reply.hint_facts),
    }
    if reply.question:
        metadata["new_conversation"] = True
    return metadata | ({} if expected is None else {"expected": expected})
