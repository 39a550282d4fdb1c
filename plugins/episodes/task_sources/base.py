"""Define TaskSource: where the tasks of episodes come from, and how students act in them.

DeskTasks           cases at generated clinic desks    (training.task_sources.desk)
RowTasks            rows of the user's datasets        (training.task_sources.rows)
EnvironmentTasks    tasks of the user's environments   (training.task_sources.environment)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from cartridge_forge.plugins.episodes.environments.action_parsing import ActionFormat
from cartridge_forge.protocols.episodes import Task


class TaskSource(Protocol):
    """Give the tasks of a recipe of episodes.

    `texts` maps each document to the text that its cartridge stands for. `order` names the document
    of each task in turn, and begins again at its end. `dialect` is how actions are written. `hints`
    are templates by hint key, none where the environment has no such keys. `exams` is the number of
    tasks that are held out, None where there is no end of them.
    """

    texts: Mapping[str, str]
    order: Sequence[str]
    dialect: ActionFormat
    hints: Mapping[str, str]
    exams: int | None

    def task(self, name: str, turn: int, stream: str, held_out: bool) -> Task:
        """Return task number `turn` (from 0) with this name, drawn from the seeded `stream`. A task
        that is held out is none that training draws."""

    def answer(self, text: str) -> str | None:
        """Return what an episode's last text gives as its answer, for records; None for a text that
        gives none."""
