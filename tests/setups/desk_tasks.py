"""Tasks at the clinic desk for tests, and what its world says by itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from cartridge_forge.plugins.clinic.desk import (
    TOOLS,
    CaseState,
    DeskCase,
    draw_case,
    draw_desk,
    reply_to,
)
from cartridge_forge.protocols.episodes import Observation, Task
from cartridge_forge.protocols.teacher_replay import AgentMessage


def a_task(seed: int = 7, max_turns: int = 8) -> Task:
    arguments = {"desk_seed": 3, "desk": 1, "fields": 4, "seed": seed, "max_turns": max_turns}
    return Task(f"desk/1/{seed}", "desk_01", arguments)


def its_case(task: Task) -> DeskCase:
    given = task.arguments
    return draw_case(draw_desk(given["desk_seed"], given["desk"], given["fields"]), given["seed"])


def solution(task: Task) -> tuple[str, str, str]:
    case = its_case(task)
    return (
        f"find {case.field} in {case.department}.",
        f"read note {case.note}.",
        f"answer {case.value}.",
    )


def replayed(case: DeskCase, texts: Sequence[str], max_turns: int) -> list[CaseState]:
    """How the case stood after 0, 1, .. calls: the same as when they were made."""

    def more(so_far: list[CaseState], text: str) -> list[CaseState]:
        return [*so_far, reply_to(case, so_far[-1], text, max_turns)]

    return reduce(more, texts, [CaseState()])


def expected_after(task: Task, actions: Sequence[str]) -> Observation:
    """What an agent must see, straight from `environments.clinic.desk`."""
    case = its_case(task)
    if not actions:
        return Observation((AgentMessage("user", case.question),), TOOLS)
    reply = replayed(case, actions, task.arguments["max_turns"])[-1].reply
    assert reply is not None
    return Observation(
        (AgentMessage("tool", reply.text),), (), reply.done, reply.reward, reply.error_kind,
        reply.hint_key, reply.hint_facts, expected=case.value if reply.done else None,
    )  # fmt: skip
