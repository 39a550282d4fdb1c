"""Give cases at generated clinic desks as tasks; a document is a desk's handbook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cartridge_forge.plugins.clinic.desk import HINTS, draw_desk
from cartridge_forge.plugins.episodes.environments.action_parsing import DESK
from cartridge_forge.plugins.episodes.spec.learn import EpisodesLearn
from cartridge_forge.protocols.episodes import Task
from cartridge_forge.protocols.step import stream_seed
from cartridge_forge.protocols.teacher_replay import ToolAction


class DeskTasks:
    """Draw cases; desks take turns. Every case draws its note and value anew, so that held-out
    cases need no numbers of their own."""

    dialect = DESK
    hints: Mapping[str, str] = HINTS
    exams: int | None = None

    def __init__(self, spec: EpisodesLearn) -> None:
        assert spec.episodes is not None
        assert spec.data.facts is not None
        self._seed, self._fields, self._episodes = spec.data.seed, spec.data.facts, spec.episodes
        desks = [draw_desk(self._seed, i, self._fields) for i in range(1, spec.data.patients + 1)]
        self.order: Sequence[str] = [desk.id for desk in desks]
        self.texts: Mapping[str, str] = {desk.id: desk.document for desk in desks}

    def task(self, name: str, turn: int, stream: str, held_out: bool) -> Task:
        number = turn % len(self.order)
        arguments = {
            "desk_seed": self._seed,
            "desk": number + 1,
            "fields": self._fields,
            "seed": stream_seed(stream),
            "max_turns": self._episodes.max_turns,
            "cases": self._episodes.cases,
        }
        return Task(name, self.order[number], arguments)

    def answer(self, text: str) -> str | None:
        call = DESK.parse(text)
        value = None
        if isinstance(call, ToolAction) and call.tool == "answer":
            value = call.arguments.get("value")
        return None if value is None else str(value)
