"""Evaluate the cartridges of finished runs against the alternatives: `forge eval RUN...`.

RUNs' last checkpoints -> cartridges --+ their documents -> whole, cut, none ---+-> a pool of
generators -> every arm, the same questions configs/eval.yaml -> questions, passages, probes
(training.evaluation)

Writes OUT/eval.json, eval.md, eval.html, two SVGs, and eval_answers.jsonl. For one run OUT is the
run directory, whose report.html gets a section. Before it measures, the command searches for
training prompts that duplicate the questions.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cartridge_forge.forge_run.commands import note
from cartridge_forge.forge_run.launch import generator_processes
from cartridge_forge.plugins.evaluate.records import Contamination, EvalRow, Evaluation
from cartridge_forge.plugins.evaluate.spec import EvalSpec
from cartridge_forge.plugins.spec_files.loading import load_file
from cartridge_forge.plugins.statistics.formatting import TableSection
from cartridge_forge.plugins.watch.console import shown_path
from cartridge_forge.plugins.watch.report.evaluation import (
    cells,
    markdown,
    plots,
    sections,
    write_page,
)
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.files import REPOSITORY, json_lines, write_atomically
from cartridge_forge.services.run_directory import EVAL_ANSWERS, EVALUATION

if TYPE_CHECKING:
    from cartridge_forge.plugins.evaluate.arms import ArmAnswers
    from cartridge_forge.plugins.evaluate.questions import EvalSuite
    from cartridge_forge.plugins.evaluate.runs import EvaluatedRun, FinishedRun

SPEC = REPOSITORY / "configs" / "eval.yaml"
SCHEMA = 1
FEW = 10  # documents: intervals over fewer say little about others


def command(
    runs: Sequence[Path],
    *,
    spec: Path | None,
    questions: int | None,
    asked: str | None,
    arms: str | None,
    contamination: Literal["fail", "warn"] | None,
    unfinished: bool,
    out: Path | None,
    show: Callable[[str], None] = note,
) -> tuple[TableSection, ...]:
    """Do the whole of `forge eval` and return its tables. Raises ForgeError."""
    chosen = load_file(EvalSpec, spec or SPEC)
    if questions is not None and questions < 1:
        raise SpecError(f"--questions must be >= 1: got {questions}")
    overrides = {"questions": questions, "contamination": contamination}
    chosen = chosen.model_copy(update={k: v for k, v in overrides.items() if v is not None})
    kinds = None if arms is None else [kind.strip() for kind in arms.split(",")]
    home = out or (runs[0].resolve() if len(runs) == 1 else runs[0].resolve().parent / "eval")
    result = evaluate(
        runs, chosen, asked=asked, kinds=kinds, out=home, show=show, unfinished=unfinished
    )
    for plot in plots(result):
        write_atomically(home / plot.file, plot.alone)
    write_atomically(home / "eval.md", markdown(result))
    write_page(home, result)
    if len(runs) == 1 and home == runs[0].resolve():
        from cartridge_forge.plugins.watch.pages.export import write_report

        write_report(home)
    show(f"written: {shown_path(home / EVALUATION)}, eval.md, eval.html")
    return sections(result)


def evaluate(
    runs: Sequence[Path],
    spec: EvalSpec,
    *,
    asked: str | None = None,
    kinds: Sequence[str] | None = None,
    out: Path,
    show: Callable[[str], None] = lambda line: None,
    unfinished: bool = False,
) -> Evaluation:
    """Measure the runs, `unfinished` ones too, and write `out`/eval.json and eval_answers.jsonl.

    Callers with a table of their own use it directly: `evaluate(paths, EvalSpec(),
    out=folder)["rows"]`. Raises SpecError or CheckpointError for runs that cannot be compared,
    DataError for data that changed and for contamination where the rule is to fail.
    """
    from cartridge_forge.learning.model.loading import load_tokenizer
    from cartridge_forge.plugins.evaluate.arms import pairs
    from cartridge_forge.plugins.evaluate.questions import set_paper
    from cartridge_forge.plugins.evaluate.runs import (
        enter,
        read_run,
        require_comparable,
        require_documents,
    )

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    finished = [read_run(path, unfinished=unfinished) for path in runs]
    require_comparable(finished)
    first = finished[0]
    tokenizer = load_tokenizer(first.learn.model.path)
    paper = set_paper(spec, first.learn, first.directory, tokenizer, asked)
    for run in finished:
        require_documents(run, paper)
    out.mkdir(parents=True, exist_ok=True)
    contamination = _contamination(finished, paper, spec, out)
    entry = enter(finished, paper, kinds, tokenizer, spec.retriever)
    notes = [*(line for run in finished for line in run.notes), *paper.notes, *entry.notes]
    for line in notes:
        show(f"note: {line}")
    with generator_processes(first.spec):
        sat = asyncio.run(
            _measure(first, paper, entry, spec, lambda row: show("  ".join(cells(row))))
        )
    names = [item.asked.document for item in paper.items]
    clusters = len(set(names))
    facts = {item.asked.fact for item in paper.items}
    if 1 < clusters < FEW:
        notes.append(
            f"intervals of differences draw {clusters} documents: so few tell little of others"
        )
    rows = [one.row for one in sat]
    has_answers = all(row["accuracy"] is not None for row in rows)
    evaluation = Evaluation(
        schema=SCHEMA,
        model=first.learn.model.path,
        source=paper.source,
        runs=[run.directory.id for run in finished],
        metric="accuracy" if has_answers else "agreement",
        resampled="documents" if clusters > 1 else "facts",
        clusters=clusters if clusters > 1 else len(facts),
        rows=rows,
        pairs=pairs(sat, [item.asked for item in paper.items], spec),
        contamination=contamination,
        notes=notes,
        spec=spec.model_dump(mode="json"),
    )
    write_atomically(out / EVALUATION, json.dumps(evaluation, indent=1, allow_nan=False) + "\n")
    write_atomically(out / EVAL_ANSWERS, json_lines(a for one in sat for a in one.answers))
    return evaluation


def _contamination(
    runs: Sequence[FinishedRun], paper: EvalSuite, spec: EvalSpec, out: Path
) -> Contamination:
    """Count the duplicates. Raises DataError where the rule is to fail and there are some."""
    from cartridge_forge.plugins.documents.near_duplicates import clean, overlaps
    from cartridge_forge.plugins.evaluate.runs import trained_on

    evaluate = runs[0].learn.evaluate
    rule = spec.contamination or evaluate.contamination
    rule = rule or ("fail" if paper.user_file else "warn")
    prompts = [text for run in runs for text in trained_on(run, paper.about)]
    overlapping = overlaps(prompts, paper.placed, evaluate.alike)
    file = out / "eval_contamination.jsonl"
    clean(overlapping, rule, file)
    exact = sum(item.kind == "exact" for item in overlapping)
    return Contamination(
        rule=rule, alike=evaluate.alike, prompts=len(prompts), questions=len(paper.items),
        exact=exact, near=len(overlapping) - exact, file=file.name if overlapping else "",
    )  # fmt: skip


async def _measure(
    run: FinishedRun,
    paper: EvalSuite,
    entry: EvaluatedRun,
    spec: EvalSpec,
    show: Callable[[EvalRow], None],
) -> list[ArmAnswers]:
    from cartridge_forge.plugins.evaluate.arms import sit
    from cartridge_forge.plugins.serve.engine.pool_backend import cartridge_pool

    most = spec.max_tokens or run.learn.evaluate.max_tokens
    pool = cartridge_pool(run.spec, entry.documents, paper.end_ids, entry.cartridges)
    async with pool as backend:
        return await sit(paper, entry.arms, spec, most, backend.generate, show)
