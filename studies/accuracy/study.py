"""Train and ask one cartridge bank in this process, and tell how many answers are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from benchmarks.meters import one_thread
from cartridge_forge.learning.batch import context_of
from cartridge_forge.learning.cartridge import composed
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.initialization import CartridgeInit, init_sources, initial_bank
from cartridge_forge.learning.model.loading import load_model, load_tokenizer, text_ids
from cartridge_forge.learning.teacher import (
    DocumentKVCache,
    TeacherDistribution,
    contexts_of,
    document_kv,
    score_kept,
)
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.plugins.clinic.text import parse_answer
from cartridge_forge.plugins.documents.spec.learn import DocumentsLearn
from cartridge_forge.plugins.documents.study.longhealth import LongHealthQuestion, open_prompts
from cartridge_forge.plugins.statistics.intervals import wilson_interval
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, TrainBatch, TrainStepOutput
from cartridge_forge.training.records import as_rollout


@dataclass(frozen=True)
class RightCount:
    """Count `right` answers of `n` questions."""

    right: int
    n: int


class StudyBench:
    """Train and evaluate one cartridge bank in this process, initialised by `cartridge.init`.
    Training is plain on policy with one update a step: `train.warm_start`, `rollout.verify` and
    `train.minibatches` do not apply."""

    def __init__(self, learn: LearnSpec) -> None:
        one_thread()
        learn = DocumentsLearn.of(learn)
        train = learn.train.model_copy(update={"minibatches": 1})
        learn = learn.model_copy(update={"train": train})
        self._learn = learn
        self.model = load_model(learn.model.path, learn.model.dtype)
        self.tasks = open_prompts(learn, load_tokenizer(learn.model.path))
        documents, layout = self.tasks.documents, self.tasks.layout
        self.names = sorted(self.tasks.patients)
        self._cache = DocumentKVCache(partial(document_kv, self.model), documents, 1 << 30)
        vocabulary = partial(text_ids, learn.model.path)
        sources = init_sources(
            layout.contexts, documents, self._cache, self.model.longest, vocabulary
        )
        cartridge_spec = learn.cartridge
        assert cartridge_spec.fresh is not None, "this sets cartridge.init to a name"
        start = CartridgeInit(
            cartridge_spec.fresh,
            cartridge_spec.tokens,
            cartridge_spec.frozen_tokens,
            learn.train.seed,
        )
        bank = initial_bank(self.model, sources, start)
        self._trainer = CartridgeTrainer(
            self.model, bank, learn.train, objective=learn.objective, loss=learn.loss,
            publish_dtype=learn.model.dtype,
        )  # fmt: skip

    def train(self, steps: int) -> list[TrainStepOutput]:
        """Train on policy, and return what each step gave."""
        trainer, learn = self._trainer, self._learn
        top = None if learn.teacher.top_k == "full" else learn.teacher.top_k
        trainer.begin("on_policy", steps)
        outputs = []
        for step in range(steps):
            prompts = self.tasks.rollout(step, trainer.version)
            completions = generate(
                self.model, [p.request for p in prompts], self.prefix, self.tasks.end_ids
            )
            samples = as_rollout(step, prompts, completions, offline=False).samples
            scored = score_kept(
                self.model,
                samples,
                contexts_of(samples, self._cache),
                learn.train.row_tokens,
                top,
                prefix=context_of,
            )
            batch = TrainBatch(doc=samples, scores={"doc_teacher": TeacherDistribution(**scored)})
            outputs.append(trainer.step(batch, trainer.version))
        return outputs

    def prefix(self, ref: PrefixRef) -> Tensor:
        """Return the prefix KV before a prompt, as a generator looks it up."""
        return composed(self.model, [self._single(part.name) for part in ref.parts])

    def right(
        self, exams: Sequence[LongHealthQuestion], requests: Sequence[GenerateRequest]
    ) -> list[bool]:
        """Answer requests, and return which of the answers are right."""
        completions = generate(self.model, requests, self.prefix, self.tasks.end_ids)
        letters = [
            parse_answer(self.tasks.decode(c.token_ids), e.question)
            for e, c in zip(exams, completions, strict=True)
        ]
        return [
            letter is not None and e.question.is_correct(letter)
            for e, letter in zip(exams, letters, strict=True)
        ]

    def ask(
        self, exams: Sequence[LongHealthQuestion], requests: Sequence[GenerateRequest]
    ) -> RightCount:
        """Answer requests, and count the right answers."""
        right = self.right(exams, requests)
        return RightCount(sum(right), len(right))

    def examined(self) -> RightCount:
        """Answer the held-out questions, each over its own cartridge."""
        exams = self.tasks.exams
        return self.ask(exams, self.tasks.exam_requests(exams, "bench", "cartridge", 0, False))

    def _single(self, name: str) -> Tensor:
        kind, _, document = name.partition("/")
        if kind == "document":
            return self._cache.get(document)
        bank = self._trainer.bank
        return bank.kv([document])[0].detach().to(self.model.dtype)


def share(counts: list[RightCount]) -> str:
    """Return the accuracy over all runs as text: `63.1% (58.2% to 67.7%)`."""
    right, n = sum(f.right for f in counts), sum(f.n for f in counts)
    low, high = wilson_interval(right, n)
    return f"{right / n:.1%} ({low:.1%} to {high:.1%})"


def table_row(*cells: str) -> list[str]:
    """Print a row of a Markdown table and return it."""
    print("| " + " | ".join(cells) + " |", flush=True)
    return list(cells)
