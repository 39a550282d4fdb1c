"""Accuracy of cartridges trained on policy, by where training starts or composed with another's;
and of the model itself with several documents before it.

    python -m benchmarks.accuracy initialization [MESH] [--init NAME]... [--seeds 1] [--set ...]...
    python -m benchmarks.accuracy composition [MESH] [--share 0.5] [--set key.path=value]...
    python -m benchmarks.accuracy together [MESH] [--set key.path=value]...

Runs of the mesh's config in this process, of one thread: the same prompts, draws, scores and steps
as `forge-run` with the same config. `--out` says where the record is written.

initialization: a run for each `cartridge.init`, or those of `--init`, and `train.seed`, and nothing
else different. The first seed is the config's. Intervals are Wilson's over all questions of all
seeds; the same questions are asked with every seed, so they are narrower than independent questions
would give.

composition: a run without `train.compose` and one with it; then the same held-out questions over
the document's cartridge alone [A], with the next document's behind [A, B] or before it [B, A]. Keys
are moved behind one another; `unmoved` leaves them at the positions that they were trained at. The
documents' own KV are composed as well: what composing costs where nothing was trained. A question
does not say whose chart it is about: those that B has too, word for word, nobody can answer over
both, and they stand in rows of their own. Intervals are Wilson's; the questions are the same in all
rows of a kind.

together: nothing is trained. The model answers the held-out questions, which name their patient,
with its chart and the next ones before them, read as one text in the documents' order: whether the
model finds one chart's answer among several.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, get_args

import torch
from torch import Tensor

from benchmarks.meters import one_thread
from benchmarks.record import benchmark
from learning.cartridge.composition import composed
from learning.cartridge.initialization import CartridgeInit, initial_bank
from learning.cartridge.sources import init_sources
from learning.decoding.decode_batch import generate
from learning.model.document_kv import DocumentKVCache, document_kv
from learning.model.loading import load_model, load_tokenizer, text_ids
from learning.packing import context_of
from learning.scoring import TeacherDistribution, contexts_of, score_kept
from learning.trainer import CartridgeTrainer
from protocols.records.intervals import wilson_interval
from protocols.spec.learn import LearnSpec
from protocols.spec.loading import load_spec
from protocols.spec.start import Init
from protocols.train_batch import TrainBatch
from protocols.types import GenerateRequest, PrefixRef, composed_ref
from training.recipes.longhealth import measure
from training.recipes.longhealth_prompts import LongHealthQuestion, open_prompts
from training.recipes.study_prompts import context_ref
from training.rollouts import as_rollout

# The order of prefixes, from a ring of documents that starts with the question's own.
ORDERS: dict[str, Callable[[Sequence[str]], Sequence[str]]] = {
    "[A]": lambda ring: ring[:1],
    "[A, B]": lambda ring: ring[:2],
    "[B, A]": lambda ring: ring[1::-1],
}


@dataclass(frozen=True)
class RightCount:
    """Count `right` answers of `n` questions."""

    right: int
    n: int


class StudyBench:
    """Train and evaluate one cartridge bank in this process, initialised by `cartridge.init`."""

    def __init__(self, learn: LearnSpec) -> None:
        one_thread()
        self._learn = learn
        self._model = load_model(learn.model.path, learn.model.dtype)
        self.tasks = open_prompts(learn, load_tokenizer(learn.model.path))
        documents, layout = self.tasks.documents, self.tasks.layout
        self.names = sorted(self.tasks.patients)
        self._cache = DocumentKVCache(partial(document_kv, self._model), documents, 1 << 30)
        vocabulary = partial(text_ids, learn.model.path)
        sources = init_sources(
            layout.contexts, documents, self._cache, self._model.longest, vocabulary
        )
        of = learn.cartridge
        assert of.fresh is not None, "this sets cartridge.init to a name"
        start = CartridgeInit(of.fresh, of.tokens, of.frozen_tokens, learn.train.seed)
        bank = initial_bank(self._model, sources, start)
        self._trainer = CartridgeTrainer(
            self._model, bank, learn.train, objective=learn.objective, loss=learn.loss,
            publish_dtype=learn.model.dtype,
        )  # fmt: skip

    def train(self, steps: int) -> list[float]:
        """Train and return the doc_kl of every step."""
        trainer, learn = self._trainer, self._learn
        top = None if learn.teacher.top_k == "full" else learn.teacher.top_k
        trainer.begin("on_policy", steps)
        kls = []
        for step in range(steps):
            prompts = self.tasks.rollout(step, trainer.version)
            done = generate(
                self._model, [p.request for p in prompts], self.prefix, self.tasks.end_ids
            )
            samples = as_rollout(step, prompts, done, 0.0, 0.0, offline=False).samples
            scored = score_kept(
                self._model,
                samples,
                contexts_of(samples, self._cache),
                learn.train.row_tokens,
                top,
                prefix=context_of,
            )
            batch = TrainBatch(doc=samples, scores={"doc_teacher": TeacherDistribution(**scored)})
            kls.append(trainer.step_on(batch, trainer.version).kl)
        return kls

    def prefix(self, ref: PrefixRef) -> Tensor:
        """Return the prefix KV before a prompt, as a generator looks it up."""
        return composed(self._model, [self._single(part.name) for part in ref.parts])

    def unmoved(self, ref: PrefixRef) -> Tensor:
        """Return the prefix with keys at the positions they were trained at, which overlap."""
        return torch.cat([self._single(part.name) for part in ref.parts], dim=3)

    def ask(
        self, exams: list[LongHealthQuestion], requests: list[GenerateRequest], moved: bool = True
    ) -> RightCount:
        """Answer requests over compositions with `moved` keys, or over `unmoved` ones."""
        lookup = self.prefix if moved else self.unmoved
        done = generate(self._model, requests, lookup, self.tasks.end_ids)
        found = measure(exams, [self.tasks.decode(c.token_ids) for c in done])
        return RightCount(round(found["accuracy"] * found["n"]), found["n"])

    def examined(self) -> RightCount:
        """Answer the held-out questions, each over its own cartridge."""
        exams = self.tasks.exams
        return self.ask(exams, self.tasks.exam_requests(exams, "bench", "cartridge", 0, False))

    def _single(self, name: str) -> Tensor:
        kind, _, document = name.partition("/")
        if kind == "document":
            return self._cache.get(document)
        bank = self._trainer.bank
        return bank.kv([document])[0].detach().to(self._model.dtype)


def share(found: list[RightCount]) -> str:
    """Return the accuracy over all runs as text: `63.1% (58.2% to 67.7%)`."""
    right, n = sum(f.right for f in found), sum(f.n for f in found)
    low, high = wilson_interval(right, n)
    return f"{right / n:.1%} ({low:.1%} to {high:.1%})"


def told(*cells: str) -> list[str]:
    """Print a row of a Markdown table and return it."""
    print("| " + " | ".join(cells) + " |", flush=True)
    return list(cells)


def started(mesh: str, sets: list[str], init: str, seed: int) -> dict[str, Any]:
    """Return the right answers before and after, and doc_kl of the first and the last step."""
    sets = [*sets, f"cartridge.init={init}", f"train.seed={seed}"]
    learn = load_spec(mesh, sets=sets).spec.learn
    study = StudyBench(learn)
    untrained = study.examined()
    kls = study.train(learn.train.steps)
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
        told(init, *arms, *ends)
        for run in runs:
            yield {**run, **{arm: vars(run[arm]) for arm in ("untrained", "trained")}}


def asked(
    study: StudyBench, exams: list[LongHealthQuestion], kind: str, order: str, moved: bool
) -> str:
    """Return the right answers over one order of prefixes of a kind, "cartridge" or "document"."""
    requests = []
    plain = study.tasks.exam_requests(exams, "bench", kind, 0, False)
    for exam, request in zip(exams, plain, strict=True):
        first = study.names.index(exam.question.patient)
        ring = [*study.names[first:], *study.names[:first]]
        prefix = composed_ref([PrefixRef(f"{kind}/{name}", 0) for name in ORDERS[order](ring)])
        requests.append(replace(request, prefix=prefix))
    return share([study.ask(exams, requests, moved)])


def by_owner(study: StudyBench) -> dict[str, list[LongHealthQuestion]]:
    """Split the questions into those that the next document, B, lacks, and those that B has too."""
    names, patients = study.names, study.tasks.patients
    following = dict(zip(names, [*names[1:], names[0]], strict=True))
    texts = {name: {q.text for q in patients[name].questions} for name in names}
    found: dict[str, list[LongHealthQuestion]] = {"A's alone": [], "B's too": []}
    for exam in study.tasks.exams:
        both = exam.question.text in texts[following[exam.question.patient]]
        found["B's too" if both else "A's alone"].append(exam)
    return found


def rows(study: StudyBench, name: str, kind: str) -> Iterator[list[str]]:
    """Yield a row for each kind of question, with keys moved and unmoved."""
    for whose, exams in by_owner(study).items():
        for moved in (True, False):
            cells = [
                asked(study, exams, kind, order, moved) if moved or order != "[A]" else ""
                for order in ORDERS
            ]
            yield told(name if moved else f"{name}, unmoved", f"{whose}, {len(exams)}", *cells)


def composition(options: argparse.Namespace) -> Iterator[Any]:
    """Print and yield rows over each order of prefixes, with and without `train.compose`."""
    print("| | questions | " + " | ".join(ORDERS) + " |\n|" + "---|" * (len(ORDERS) + 2))
    for compose in (0.0, options.share):
        sets = [*options.set, f"train.compose={compose}"]
        learn = load_spec(options.mesh, sets=sets).spec.learn
        study = StudyBench(learn)
        if not compose:
            yield from rows(study, "documents, whole", "document")
        study.train(learn.train.steps)
        yield from rows(study, f"trained, compose {compose:g}", "cartridge")


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
        found = study.ask(exams, requests)
        told(str(count), share([found]))
        yield {"charts": count, **vars(found)}


KINDS = {"initialization": initialization, "composition": composition, "together": together}

if __name__ == "__main__":
    benchmark(
        __doc__,
        lambda asked: ({}, list(KINDS[asked.of](asked))),
        {
            "of": {"choices": KINDS},
            "mesh": {"nargs": "?", "default": "meshes/longhealth.yaml"},
            "--init": {"action": "append", "choices": get_args(Init), "default": []},
            "--seeds": 1,
            "--share": 0.5,
            "--set": {"action": "append", "default": []},
        },
    )
