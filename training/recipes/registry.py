"""Open the recipe of a run, and a local stand-in for its external teachers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from learning.model.loading import load_tokenizer
from protocols.spec.learn import LearnSpec
from protocols.spec.mesh import RunSpec
from protocols.spec.users.documents import SelfStudySpec
from protocols.spec.users.rows import ROW_SOURCES
from services.mesh import Mesh
from services.run_directory import RunDirectory
from training.recipes.base import Recipe
from training.task_sources.base import TaskSource


def open_course(spec: RunSpec, mesh: Mesh, directory: RunDirectory | None = None) -> Recipe:
    """Return the recipe of a spec, over pools that are yet to be spawned into `mesh`.
    DocumentsRecipe writes its questions into the run's `directory`."""
    learn = spec.learn
    tokenizer = load_tokenizer(learn.model.path)
    date = None if directory is None else directory.date
    if learn.episodes is not None:
        from training.recipes.tool_episodes import ToolEpisodesRecipe

        tasks = open_tasks(learn, tokenizer, directory)
        return ToolEpisodesRecipe(learn, tasks, tokenizer, mesh, date)
    if learn.rsa is not None:
        from training.recipes.rsa import RSARecipe

        return RSARecipe(learn, tokenizer, mesh, date)
    if learn.data.source in ROW_SOURCES:
        from documents.rows.reading import read_row_set
        from training.recipes.documents import DocumentsRecipe
        from training.recipes.study_material import row_corpus
        from training.task_sources.row_checks import note_rows, require_plain

        assert directory is not None
        rows = read_row_set(learn)
        require_plain(rows, tokenizer)
        note_rows(rows, directory)
        learn = learn.model_copy(update={"self_study": SelfStudySpec()})
        corpus = row_corpus(learn, rows, tokenizer)
        return DocumentsRecipe(learn, corpus, (), tokenizer, directory, rows)
    if learn.self_study is not None:
        from training.recipes.documents import DocumentsRecipe
        from training.recipes.study_material import read_material

        assert directory is not None
        parts, asked = read_material(learn, tokenizer)
        return DocumentsRecipe(learn, parts, asked, tokenizer, directory)
    from training.recipes.longhealth import LongHealthRecipe
    from training.recipes.longhealth_prompts import open_prompts

    prompts = open_prompts(learn, tokenizer, date)
    return LongHealthRecipe(prompts, measured=bool(learn.evaluate.arms))


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


@contextmanager
def teachers(spec: RunSpec) -> Iterator[RunSpec]:
    """Yield the spec; with `replay.local`, its teachers are at a local provider meanwhile."""
    replay = spec.learn.replay
    if replay is None or replay.local is None:
        yield spec
        return
    from environments.clinic.fake_teachers import at, local_provider

    with local_provider(replay, replay.local) as provider:
        learn = spec.learn.model_copy(update={"replay": at(replay, provider)})
        yield spec.model_copy(update={"learn": learn})
