"""Open the tasks of a run's episodes."""

from __future__ import annotations

from typing import Any

from protocols.spec.learn import LearnSpec
from protocols.spec.users.rows import ROW_SOURCES
from services.run_directory import RunDirectory
from training.task_sources.base import TaskSource


def open_tasks(learn: LearnSpec, tokenizer: Any, directory: RunDirectory | None) -> TaskSource:
    """Return the tasks of episodes. Rows are noted in the run's `directory`: raises CheckpointError
    for others than those that it began with."""
    if learn.data.source in ROW_SOURCES:
        from documents.rows.reading import read_row_set
        from training.task_sources.row_checks import note_rows, require_lengths, require_plain
        from training.task_sources.rows import RowTasks

        rows = read_row_set(learn)
        require_plain(rows, tokenizer)
        if directory is not None:
            note_rows(rows, directory)
        tasks = RowTasks(rows, learn.train.seed)
        require_lengths(learn, tasks.texts, tokenizer)
        return tasks
    if learn.data.source == "desk":
        from training.task_sources.desk import DeskTasks

        return DeskTasks(learn)
    from training.task_sources.environment import EnvironmentTasks

    return EnvironmentTasks(learn)
