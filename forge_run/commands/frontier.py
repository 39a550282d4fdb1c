"""Compare test-time strategies over the cartridges of a run: `forge frontier RUN`.

RUN's newest on-policy checkpoint -> cartridges -> a pool of generators configs/frontier.yaml ->
arms -> accuracy, tokens, seconds (training.evaluation.strategies)

Writes RUN/frontier.json, RUN/frontier_answers.jsonl and a section of RUN/report.html, and returns
the table.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cartridge_forge.forge_run.commands import note
from cartridge_forge.forge_run.launch import generator_processes
from cartridge_forge.plugins.documents.spec.learn import DocumentsLearn
from cartridge_forge.plugins.evaluate.spec import FrontierSpec
from cartridge_forge.plugins.evaluate.strategies import (
    ArmRow,
    compare,
    findings_questions,
    option_questions,
)
from cartridge_forge.plugins.spec_files.loading import load_file, load_resolved
from cartridge_forge.plugins.statistics.formatting import TableSection
from cartridge_forge.plugins.watch.report.frontier import arms_table, cells
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.files import REPOSITORY, json_lines, write_atomically
from cartridge_forge.protocols.records.answers import Answer, AnswerRow, to_row
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.protocols.step import PrefixRef
from cartridge_forge.services.run_directory import FRONTIER, FRONTIER_ANSWERS, RunDirectory

ARMS = REPOSITORY / "configs" / "frontier.yaml"


def command(
    run: Path,
    *,
    arms: Path | None,
    questions: int | None,
    show: Callable[[str], None] = note,
) -> tuple[TableSection, ...]:
    """Measure every arm and return the table. Raises ForgeError."""
    directory = RunDirectory(run.resolve())
    if not directory.spec.is_file():
        raise SpecError(f"{run} is no run directory: name one, such as runs/longhealth/latest")
    spec = load_resolved(directory.spec)
    if DocumentsLearn.of(spec.learn).data.source not in ("clinic", "longhealth"):
        raise SpecError(f"run {directory.id} has no option questions: strategies answer those")
    chosen = load_file(FrontierSpec, arms or ARMS)
    if questions is not None and questions < 1:
        raise SpecError(f"--questions must be >= 1: got {questions}")
    if questions is not None:
        chosen = chosen.model_copy(update={"questions": questions})
    return (section(*measure(directory, chosen, show)),)


def measured(directory: RunDirectory, chosen: FrontierSpec) -> bool:
    """Return whether the run has a frontier of these arms and settings."""
    file = directory.path / FRONTIER
    if not file.is_file():
        return False
    content = json.loads(file.read_text(encoding="utf-8"))
    if [arm["name"] for arm in content["arms"]] != [arm.name for arm in chosen.arms]:
        return False
    return all(content.get(key) == value for key, value in _settings(chosen).items())


def measure(
    directory: RunDirectory, chosen: FrontierSpec, show: Callable[[str], None]
) -> tuple[list[ArmRow], int]:
    """Measure every arm over the run, write its files, and return the rows and the version."""
    spec = load_resolved(directory.spec)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with generator_processes(spec):
        rows, version, answers = asyncio.run(_measure(spec, directory, chosen, show))
    record = {
        "version": version,
        **_settings(chosen),
        "arms": [row.as_dict() for row in rows],
    }
    write_atomically(directory.path / FRONTIER, json.dumps(record, indent=1) + "\n")
    write_atomically(directory.path / FRONTIER_ANSWERS, json_lines(answers))
    from cartridge_forge.plugins.watch.pages.export import write_report

    write_report(directory.path)
    return rows, version


def _settings(chosen: FrontierSpec) -> dict[str, Any]:
    return chosen.model_dump(mode="json", exclude={"arms"}, exclude_none=True)


def section(rows: Sequence[ArmRow], version: int) -> TableSection:
    """Return the table of the arms."""
    title = f"{rows[0].n} questions over version {version}; tokens and calls a question"
    return arms_table(title, rows)


async def _measure(
    spec: RunSpec, directory: RunDirectory, chosen: FrontierSpec, show: Callable[[str], None]
) -> tuple[list[ArmRow], int, list[AnswerRow]]:
    # Imported here: a bad spec is refused before torch is imported.
    from cartridge_forge.learning.model.loading import load_tokenizer
    from cartridge_forge.plugins.documents.study.longhealth import open_prompts
    from cartridge_forge.plugins.library.formats.run_checkpoint import (
        chosen_checkpoint,
        read_cartridges,
    )
    from cartridge_forge.plugins.serve.engine.pool_backend import cartridge_pool
    from cartridge_forge.plugins.strategies.judges.opening import opened_judge
    from cartridge_forge.plugins.strategies.samplers.sampler import AlternatingSampler
    from cartridge_forge.plugins.strategies.samplers.token_sampler import TokenSampler

    learn = DocumentsLearn.of(spec.learn)
    version, cartridges = read_cartridges(chosen_checkpoint(directory.path))
    tasks = open_prompts(learn, load_tokenizer(learn.model.path), directory.date)
    numbered = dict(enumerate(sorted(cartridges.items())))
    async with (
        opened_judge(chosen.process_reward, f"frontier/{directory.id}") as judge,
        cartridge_pool(spec, tasks.documents, tasks.end_ids, numbered) as backend,
    ):
        versions = {name: number for number, (name, _) in numbered.items()}
        samplers = {}
        for context, document in tasks.layout.documents.items():
            name = tasks.layout.cartridge_of(document)
            ref = PrefixRef(f"cartridge/{name}", versions[name])
            samplers[document] = TokenSampler(backend.generate, tasks.conversation, context, ref)
        answers: list[AnswerRow] = []

        def keep(row: ArmRow, answer_batch: Sequence[Answer]) -> None:
            answers.extend(
                to_row(answer, row.name, version, sampled=True) for answer in answer_batch
            )

        if chosen.parts > 1:
            questions = findings_questions(
                tasks, chosen.parts, chosen.charts, chosen.questions, chosen.seed
            )
        else:
            questions = option_questions(tasks, chosen.questions)
        rows = await compare(
            chosen, questions, lambda names: AlternatingSampler([samplers[n] for n in names]),
            lambda row: show("  ".join(cells(row))), keep, judge,
        )  # fmt: skip
    return rows, version, answers
