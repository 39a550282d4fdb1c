"""Ask trained cartridges for their documents, and count the facts and sentences given back."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cartridge_forge.learning.decode import generate
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.clinic.text import sentences, structure_prompt, summarise_prompt
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.step import (
    BARE,
    NO_DOCUMENT,
    GenerateRequest,
    PrefixRef,
    Sampling,
    stream_seed,
)
from cartridge_forge.training.records import with_title
from studies.accuracy.study import RightCount, StudyBench, share, table_row


def note_prompts(study: StudyBench, patient: str) -> list[str]:
    """Return the prompts that ask for whole notes of a chart by their numbers."""
    notes = range(1, len(study.tasks.patients[patient].texts) + 1)
    return [ask(note) for note in notes for ask in (structure_prompt, summarise_prompt)]


def replies(
    study: StudyBench, patient: str, texts: Sequence[str], kind: str, draws: int
) -> list[str]:
    """Return the answers to each text, `draws` at temperature 1 or one greedy for 0, before a
    prefix of the kind."""
    tasks, requests = study.tasks, []
    bare = kind == NO_DOCUMENT
    prefix = BARE if bare else PrefixRef(f"{kind}/{patient}", 0)
    for number, text in enumerate(texts):
        ids = tasks.conversation.opening(
            None if bare else patient,
            (AgentMessage("user", with_title(tasks.titles, patient, text)),),
        )
        for draw in range(draws or 1):
            sampling = Sampling(1.0 if draws else 0.0, max_tokens=96)
            name = f"extraction/{patient}/{number}/{draw}"
            requests.append(GenerateRequest(name, ids, prefix, sampling, stream_seed(name)))
    done = generate(study.model, requests, study.prefix, tasks.end_ids)
    return [tasks.decode(c.token_ids) for c in done]


def held_by(said: Sequence[str], facts: Mapping[str, str]) -> int:
    """Count the facts that stand in one of the answers as in a chart: the field, then its value."""
    texts = [f" {text.replace('.', ' ')} " for text in said]
    return sum(
        any(f" {field} {value} " in text for text in texts) for field, value in facts.items()
    )


def extraction(options: argparse.Namespace) -> Iterator[Any]:
    """Print and yield a row for each prefix: facts and sentences that are given back."""
    learn = load_spec(options.mesh, sets=options.set).spec.learn
    study = StudyBench(learn)
    table_row(
        "prefix", "asked by field", "notes, greedy", "notes, 8 draws", "sentences word for word"
    )
    print("|---|---|---|---|---|")
    kinds = {"none": "none", "untrained": "cartridge", "trained": "cartridge", "whole": "document"}
    for name, kind in kinds.items():
        if name == "trained":
            study.train(learn.train.steps)
        counts = [RightCount(0, 0)] * 4
        for patient, chart in study.tasks.patients.items():
            asked_one = {q.text: q.correct for q in chart.questions}
            single = replies(study, patient, list(asked_one), kind, 0)
            named = sum(
                f" {value} " in f" {text.replace('.', ' ')} "
                for text, value in zip(single, asked_one.values(), strict=True)
            )
            facts = {t.removeprefix("what is the ")[:-1]: v for t, v in asked_one.items()}
            notes = note_prompts(study, patient)
            greedy = replies(study, patient, notes, kind, 0)
            drawn = replies(study, patient, notes, kind, 8)
            lines = sentences(chart.document)
            copied = {part for text in [*greedy, *drawn] for part in sentences(text + ".")}
            found = [
                RightCount(named, len(facts)),
                RightCount(held_by(greedy, facts), len(facts)),
                RightCount(held_by(drawn, facts), len(facts)),
                RightCount(sum(line in copied for line in lines), len(lines)),
            ]
            counts = [
                RightCount(a.right + b.right, a.n + b.n) for a, b in zip(counts, found, strict=True)
            ]
        table_row(name, *(share([count]) for count in counts))
        yield {"prefix": name, "counts": [vars(count) for count in counts]}
