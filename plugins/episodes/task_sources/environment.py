"""Give the tasks of the user's environments, each with a cartridge of its own, and cases at
generated clinic desks, whose document is the desk's handbook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cartridge_forge.plugins.chat.episodes import Task
from cartridge_forge.plugins.chat.messages import ToolAction
from cartridge_forge.plugins.clinic.desk import HINTS, draw_desk
from cartridge_forge.plugins.environments.action_parsing import DESK, JSON
from cartridge_forge.plugins.environments.spec import EnvironmentSpec
from cartridge_forge.plugins.episodes.spec.learn import EpisodesLearn
from cartridge_forge.plugins.episodes.task_sources.base import PRIMER_TEXT
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import stream_seed

MOST_TURNS = 1000  # of the cycle in which environments take turns
SEEDS = 1 << 30  # twice as many fit any integer type of an environment


class EnvironmentTasks:
    """Draw tasks by seed, or by number where the environment has `tasks` distinct ones."""

    dialect = JSON
    hints: Mapping[str, str] = {}
    exams: int | None = None

    def __init__(self, spec: EpisodesLearn) -> None:
        """Raise DataError for a document that cannot be read or is empty."""
        assert spec.episodes is not None
        self._held_out = spec.evaluate.questions
        self._environments = {e.id: e for e in spec.episodes.played}
        self.texts: Mapping[str, str] = {e.id: document_of(e) for e in spec.episodes.played}
        weights = {e.id: e.weight for e in spec.episodes.played}
        self.order: Sequence[str] = turns_by_weight(weights)

    def task(self, name: str, turn: int, stream: str, held_out: bool) -> Task:
        environment_name = self.order[turn % len(self.order)]
        environment = self._environments[environment_name]
        if environment.tasks is None:
            number = 2 * (stream_seed(stream) % SEEDS) + held_out
        elif held_out:
            number = turn % self._held_out
        else:
            trained = environment.tasks - self._held_out
            number = self._held_out + stream_seed(stream) % trained
        if environment.kind == "verifiers":
            return Task(name, environment_name, {"index": number}, environment_name)
        return Task(name, environment_name, {**environment.reset, "seed": number}, environment_name)

    def answer(self, text: str) -> str | None:
        return text


def document_of(environment: EnvironmentSpec) -> str:
    """Return the text that an environment's cartridge stands for."""
    if environment.document is None:
        return PRIMER_TEXT
    try:
        text = Path(environment.document).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the document of the environment {environment.id} cannot be read: {error}; name a "
            "text file in UTF-8"
        ) from error
    if not text:
        raise DataError(f"{environment.document} is empty; write the rules of {environment.id}")
    return text


def turns_by_weight(weights: Mapping[str, float]) -> list[str]:
    """Return a cycle in which each name has its share of the turns, spread evenly:
    `turns_by_weight({"a": 2, "b": 1})` is ["a", "b", "a"]. A share below 1 in MOST_TURNS gets one
    turn."""
    least, total = min(weights.values()), sum(weights.values())
    counts = [round(w / least) for w in weights.values()]
    exact = all(abs(w / least - n) < 1e-9 for w, n in zip(weights.values(), counts, strict=True))
    length = sum(counts) if exact and sum(counts) <= MOST_TURNS else MOST_TURNS
    credit = dict.fromkeys(weights, 0.0)
    order = []
    for _ in range(length):
        for name, weight in weights.items():
            credit[name] += weight / total
        best = max(credit, key=credit.__getitem__)  # the first of equal ones
        credit[best] -= 1.0
        order.append(best)
    return order + [name for name in weights if name not in order]


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
