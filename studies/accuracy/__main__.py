"""Accuracy of cartridges trained on policy, by where training starts, and of the model itself with
several documents before it.

    python -m studies.accuracy initialization [MESH] [--init NAME]... [--seeds 1] [--set ...]...
    python -m studies.accuracy together [MESH] [--set key.path=value]...
    python -m studies.accuracy extraction [MESH] [--set key.path=value]...

Runs of the mesh's config in this process, of one thread: the same prompts, draws, scores and steps
as `forge-run` with the same config. `--out` says where the record is written.

initialization: a run for each `cartridge.init`, or those of `--init`, and `train.seed`, and nothing
else different. The first seed is the config's. Intervals are Wilson's over all questions of all
seeds; the same questions are asked with every seed, so they are narrower than independent questions
would give.

together: nothing is trained. The model answers the held-out questions, which name their patient,
with its chart and the next ones before them, read as one text in the documents' order: whether the
model finds one chart's answer among several.

extraction: what a person gets out of trained cartridges who knows the form of the charts, not their
content. Share of all facts whose value is given back without options: asked one by one by the
field's name; asked for whole notes ("list", "summarise"), greedily and in 8 draws; and the share of
the chart's sentences that these answers hold word for word. The same prompts without a document
tell what guessing gives, with the whole chart what can be had at most.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any, get_args

from benchmarks.record import benchmark
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.spec.cartridge import Init
from cartridge_forge.training.records import context_ref
from studies.accuracy.extraction import extraction
from studies.accuracy.study import StudyBench, share, table_row


def started(mesh: str, sets: list[str], init: str, seed: int) -> dict[str, Any]:
    """Return the right answers before and after, and doc_kl of the first and the last step."""
    sets = [*sets, f"cartridge.init={init}", f"train.seed={seed}"]
    learn = load_spec(mesh, sets=sets).spec.learn
    study = StudyBench(learn)
    untrained = study.examined()
    kls = [output.kl for output in study.train(learn.train.steps)]
    return {
        "init": init, "seed": seed, "untrained": untrained, "trained": study.examined(),
        "first_kl": kls[0], "last_kl": fmean(kls[-5:]),
    }  # fmt: skip


def initialization(options: argparse.Namespace) -> Iterator[Any]:
    """Print a row for each initialization; yields its runs."""
    print("| init | untrained | trained | doc_kl, first step | last five |\n|---|---|---|---|---|")
    first = load_spec(options.mesh, sets=options.set).spec.learn.train.seed
    for init in options.init or get_args(Init):
        seeds = range(first, first + options.seeds)
        runs = [started(options.mesh, options.set, init, seed) for seed in seeds]
        arms = (share([run[arm] for run in runs]) for arm in ("untrained", "trained"))
        ends = (f"{fmean(run[end] for run in runs):.3f}" for end in ("first_kl", "last_kl"))
        table_row(init, *arms, *ends)
        for run in runs:
            yield {**run, **{arm: vars(run[arm]) for arm in ("untrained", "trained")}}


def together(options: argparse.Namespace) -> Iterator[Any]:
    """Print and yield the right answers with 1, 2, ... charts before each question."""
    sets = [*options.set, "data.name_document=always"]
    study = StudyBench(load_spec(options.mesh, sets=sets).spec.learn)
    exams, names = study.tasks.exams, study.names
    plain = study.tasks.exam_requests(exams, "bench", "document", 0, False)
    print("| charts before a question | right |\n|---|---|")
    for count in range(1, len(names) + 1):
        requests = []
        for exam, request in zip(exams, plain, strict=True):
            first = names.index(exam.question.patient)
            read = sorted([*names[first:], *names[:first]][:count])
            requests.append(replace(request, prefix=context_ref(read)))
        count_right = study.ask(exams, requests)
        table_row(str(count), share([count_right]))
        yield {"charts": count, **vars(count_right)}


KINDS = {
    "initialization": initialization,
    "together": together,
    "extraction": extraction,
}

if __name__ == "__main__":
    benchmark(
        __doc__,
        lambda options: ({}, list(KINDS[options.of](options))),
        {
            "of": {"choices": KINDS},
            "mesh": {"nargs": "?", "default": "meshes/longhealth.yaml"},
            "--init": {"action": "append", "choices": get_args(Init), "default": []},
            "--seeds": 1,
            "--set": {"action": "append", "default": []},
        },
    )
