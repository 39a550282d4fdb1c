"""Play episodes of one turn: a row's prompt, and the student's answer.

The episode ends with the answer and without a reward, which the run's rewards give. All that it
needs is in the task's arguments, so any replica plays any episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cartridge_forge.plugins.chat.episodes import EnvironmentRequest, Observation, Task
from cartridge_forge.plugins.chat.messages import AgentMessage, AgentTool

ROW = "row"  # the argument of a task that holds its row's columns


def task_of(
    name: str,
    document: str,
    messages: tuple[AgentMessage, ...],
    tools: tuple[AgentTool, ...],
    row: Mapping[str, Any],
) -> Task:
    """Return the task of a row; `row` are its columns, for rewards."""
    arguments = {
        "messages": [[m.role, m.content] for m in messages],
        "tools": [[t.name, t.description, dict(t.parameters)] for t in tools],
        ROW: dict(row),
    }
    return Task(name, document, arguments)


def columns_of(task: Task) -> dict[str, Any]:
    """Return what rewards know of a task: the columns of its row, or its arguments."""
    return dict(task.arguments.get(ROW, task.arguments))


def answered_once(move: EnvironmentRequest) -> Observation:
    """Return the prompt for a reset, and the end after an action."""
    if move.actions:
        return Observation(done=True, expected=_expected(move.task))
    arguments = move.task.arguments
    return Observation(
        messages=tuple(AgentMessage(role, text) for role, text in arguments["messages"]),
        tools=tuple(AgentTool(*tool) for tool in arguments["tools"]),
    )


async def answer_rows(moves: Sequence[EnvironmentRequest]) -> list[Observation]:
    """Return the observation of each move; there is nothing to wait for."""
    return [answered_once(move) for move in moves]


def _expected(task: Task) -> str | None:
    answer = task.arguments[ROW].get("answer")
    return None if answer is None else str(answer)
