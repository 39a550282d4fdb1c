"""Open the tasks of a run's episodes."""

from __future__ import annotations

from typing import Any

from cartridge_forge.plugins.documents.spec.rows import ROW_SOURCES
from cartridge_forge.plugins.episodes.spec.learn import EpisodesLearn
from cartridge_forge.plugins.episodes.task_sources.base import TaskSource
from cartridge_forge.plugins.episodes.task_sources.handbook import HandbookTasks, require_fit
from cartridge_forge.services.run_directory import RunDirectory


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
