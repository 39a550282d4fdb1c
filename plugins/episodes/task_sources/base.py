"""Define TaskSource: where the tasks of episodes come from, and how students act in them.

DeskTasks           cases at generated clinic desks    (plugins.episodes.task_sources.environment)
RowTasks            rows of the user's datasets        (plugins.episodes.task_sources.rows)
EnvironmentTasks    tasks of the user's environments   (plugins.episodes.task_sources.environment)
HandbookTasks       tasks that a handbook governs      (plugins.episodes.task_sources.handbook)

`PRIMER` is a page on solving problems, for cartridges that stand for no document of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cartridge_forge.plugins.chat.episodes import Task
from cartridge_forge.plugins.documents.spec.rows import ROW_SOURCES
from cartridge_forge.plugins.environments.action_parsing import ActionFormat
from cartridge_forge.plugins.episodes.spec.learn import EpisodesLearn
from cartridge_forge.plugins.episodes.task_sources.handbook import HandbookTasks, require_fit
from cartridge_forge.services.run_directory import RunDirectory


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


def open_tasks(learn: EpisodesLearn, tokenizer: Any, directory: RunDirectory | None) -> TaskSource:
    """Return the tasks of episodes. Rows and handbooks are noted in the run's `directory`: raises
    CheckpointError for others than those that it began with."""
    from cartridge_forge.plugins.documents.rows.checks import note_data

    if learn.data.source in ROW_SOURCES:
        from cartridge_forge.plugins.documents.rows.checks import (
            note_rows,
            require_lengths,
            require_plain,
        )
        from cartridge_forge.plugins.documents.rows.reading import read_row_set
        from cartridge_forge.plugins.episodes.task_sources.rows import RowTasks

        rows = read_row_set(learn)
        require_plain(rows, tokenizer)
        if directory is not None:
            note_rows(rows, directory)
        tasks = RowTasks(rows, learn.train.seed)
        require_lengths(learn, tasks.texts, tokenizer)
        return tasks
    if learn.data.source == "desk":
        from cartridge_forge.plugins.episodes.task_sources.environment import DeskTasks

        return DeskTasks(learn)
    if learn.data.source == "handbook":
        handbooks = open_handbooks(learn, tokenizer)
        if directory is not None:
            note_data(handbooks.facts, directory)
        return handbooks
    from cartridge_forge.plugins.episodes.task_sources.environment import EnvironmentTasks

    return EnvironmentTasks(learn)


def open_handbooks(learn: EpisodesLearn, tokenizer: Any) -> HandbookTasks:
    """Return the tasks of a spec's handbooks. Raises as `read_handbooks` does, and DataError for
    texts that a cartridge cannot stand for and tasks that do not fit."""
    from cartridge_forge.plugins.documents.rows.checks import require_lengths
    from cartridge_forge.plugins.episodes.handbooks.reading import read_handbooks

    tasks = HandbookTasks(read_handbooks(learn), learn.train.seed)
    require_lengths(learn, tasks.texts, tokenizer)
    require_fit(learn, tasks, tokenizer)
    return tasks
