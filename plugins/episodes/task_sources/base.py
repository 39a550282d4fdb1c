"""Define TaskSource: where the tasks of episodes come from, and how students act in them.

DeskTasks           cases at generated clinic desks    (plugins.episodes.task_sources.environment)
RowTasks            rows of the user's datasets        (plugins.episodes.task_sources.rows)
EnvironmentTasks    tasks of the user's environments   (plugins.episodes.task_sources.environment)
HandbookTasks       tasks that a handbook governs      (plugins.episodes.task_sources.handbook)

`PRIMER` is a page on solving problems, for cartridges that stand for no document of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from cartridge_forge.plugins.chat.episodes import Task
from cartridge_forge.plugins.environments.action_parsing import ActionFormat


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


PRIMER = "primer"
PRIMER_TEXT = """\
How to solve problems. Read the whole problem before you begin, and say in your own words what is \
asked for and in which form the answer is wanted. List what is given. Look for a method that fits, \
and try it on a small case. Then work step by step, one small step at a time, and check each step \
before you go on: put numbers back in, count again, look at units and at the extreme cases. When a \
step fails, go back to the last one that holds. Do not guess while you can compute.
How to review attempts at a problem. An attempt may be right, wrong or unfinished, and one that \
sounds sure may be wrong. Do not count votes alone: many attempts can share one mistake. Check \
where they differ first, for there at least one of them is wrong, and settle each difference by \
working that step out again yourself. Take over the steps that hold, from whichever attempt they \
come, and repair or drop the others. If every attempt fails, set all of them aside and solve the \
problem in another way. End with one answer, in the form that was asked for.
"""
