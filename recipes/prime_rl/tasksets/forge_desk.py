"""Play the clinic desk under verifiers and prime-rl: a taskset and its environment, forge_desk.

    load_environment(desk_seed=1, desk=3, cases=200)

The clerk writes one call a turn, `find surgeon in cardiology.`, and reads the desk's reply as the
user's next message. The reward is 1 for the right value, else 0; a metric counts failed calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import verifiers.v1 as vf

from cartridge_forge.plugins.clinic.desk import (
    CaseState,
    DeskCase,
    bounded,
    draw_case,
    draw_desk,
    reply_to,
)

INSTRUCTIONS = (
    "You are a clerk. You are asked for one value of a record. Write one call a turn, nothing "
    "else:\nfind FIELD in DEPARTMENT.\nread note NUMBER.\nanswer VALUE."
)


class DeskPlayConfig(vf.TasksetConfig):
    """Choose the desk and its cases.

    instructions  before the handbook; empty for a model that was trained at the desk
    handbook      False where the served model's cartridge stands for it
    """

    desk_seed: int = 0
    desk: int = 1
    fields: int = 4
    first_case: int = 0
    cases: int = 100
    max_turns: int = 8
    instructions: str = INSTRUCTIONS
    handbook: bool = True


class DeskCaseData(vf.TaskData):
    desk_seed: int
    desk: int
    fields: int
    case: int
    max_turns: int

    @property
    def drawn(self) -> DeskCase:
        return draw_case(draw_desk(self.desk_seed, self.desk, self.fields), self.case)


class DeskCaseTask(vf.Task[DeskCaseData, vf.State]):
    @vf.reward
    async def answered(self, trace: vf.Trace) -> float:
        played = self._replies(trace)
        last = played[-1].reply if played else None
        return (last.reward or 0.0) if last else 0.0

    @vf.metric
    async def failed_calls(self, trace: vf.Trace) -> float:
        return float(sum(bool(s.reply and s.reply.error_kind) for s in self._replies(trace)))

    def _replies(self, trace: vf.Trace) -> list[CaseState]:
        """Return the case's state after each of the clerk's messages: they determine it."""
        case, states = self.data.drawn, [CaseState()]
        for message in trace.assistant_messages:
            if states[-1].reply is not None and states[-1].reply.done:
                break
            call = bounded(message.content or "")
            states.append(reply_to(case, states[-1], call, self.data.max_turns))
        return states[1:]


class DeskTaskset(vf.Taskset[DeskCaseTask, DeskPlayConfig]):
    def load(self) -> Iterable[DeskCaseTask]:
        config = self.config
        desk = draw_desk(config.desk_seed, config.desk, config.fields)
        handbook = desk.document if config.handbook else ""
        system = "\n\n".join(filter(None, (config.instructions, handbook))) or None
        for case in range(config.first_case, config.first_case + config.cases):
            yield DeskCaseTask(
                DeskCaseData(
                    name=f"{desk.id}/{case}",
                    prompt=draw_case(desk, case).question,
                    system_prompt=system,
                    desk_seed=config.desk_seed,
                    desk=config.desk,
                    fields=config.fields,
                    case=case,
                    max_turns=config.max_turns,
                ),
                config.task,
            )


class DeskPlayEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime={"type": "subprocess"})


class DeskPlayEnv(vf.Env[DeskPlayEnvConfig]):
    """One clerk, and the desk as the user that answers it."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        assert isinstance(task, DeskCaseTask)
        case, state = task.data.drawn, CaseState()
        async with agents.agent.interaction(task) as talk:
            turn = await talk.turn()
            while not turn.terminated:
                call = bounded(turn.last_reply)
                state = reply_to(case, state, call, task.data.max_turns)
                assert state.reply is not None
                if state.reply.done:
                    break
                turn = await talk.turn(state.reply.text)


def load_environment(agent: Mapping[str, Any] | None = None, **arguments: Any) -> vf.Env:
    """Return the environment; `arguments` are those of the taskset, `agent` overrides the clerk's
    harness, runtime or limits."""
    return vf.load_environment(
        vf.resolve_env_config(
            {"taskset": {"id": "forge_desk", **arguments}, "agent": {**(agent or {})}}
        )
    )


__all__ = ["DeskPlayEnv", "DeskTaskset", "load_environment"]
