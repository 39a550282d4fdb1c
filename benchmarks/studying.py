"""A whole on-policy run in this process, of one thread: what the mesh does, without the mesh.

The same prompts, draws, scores and steps as `forge-run` with the same config.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from learning.decoding import generate
from learning.initial import Source, Start, initial_bank
from learning.model import document_kv, flush_denormals, load_model, load_tokenizer, text_ids
from learning.prefixes import DocumentCache
from learning.rotation import composed
from learning.scoring import prefixes_of, score_kept
from learning.teacher_logprobs import Teacher
from learning.trainer import CartridgeTrainer
from protocols.channels import Lesson
from protocols.learn_spec import LearnSpec
from protocols.types import GenerateRequest, PrefixRef
from services.evaluation import measure
from services.rollouts import as_rollout
from services.tasks import Exam, Tasks, read_patients


@dataclass(frozen=True)
class Right:
    """So many of n questions answered rightly."""

    right: int
    n: int


class Study:
    """One bank, from where `cartridge.init` starts it."""

    def __init__(self, learn: LearnSpec) -> None:
        torch.set_num_threads(1)
        flush_denormals()
        self._learn = learn
        self._model = load_model(learn.model.path, learn.model.dtype)
        patients = read_patients(learn.data)
        self.tasks = Tasks(learn, patients, load_tokenizer(learn.model.path))
        documents = self.tasks.documents
        self.names = sorted(p.id for p in patients)
        self._cache = DocumentCache(partial(document_kv, self._model), documents, 1 << 30)
        vocabulary = partial(text_ids, learn.model.path)
        sources = [Source(n, documents[n], self._cache.get(n), vocabulary) for n in self.names]
        of = learn.cartridge
        start = Start(of.init, of.tokens, of.frozen, learn.train.seed)
        bank = initial_bank(self._model, sources, start)
        self._trainer = CartridgeTrainer(
            self._model, bank, learn.train, objective=learn.objective, loss=learn.loss,
            publish_dtype=learn.model.dtype,
        )  # fmt: skip

    def train(self, steps: int) -> list[float]:
        """doc_kl of every step."""
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
                self._model, samples, prefixes_of(samples, self._cache), learn.train.row_tokens, top
            )
            batch = Lesson(doc=samples, scores={"doc_teacher": Teacher(**scored)})
            kls.append(trainer.step_on(batch, trainer.version).kl)
        return kls

    def prefix(self, ref: PrefixRef) -> Tensor:
        """What stands before a prompt, as a generator looks it up."""
        return composed(self._model, [self._single(part.name) for part in ref.parts])

    def unmoved(self, ref: PrefixRef) -> Tensor:
        """The same prefixes with their keys where they were trained, one over the other."""
        return torch.cat([self._single(part.name) for part in ref.parts], dim=3)

    def ask(self, exams: list[Exam], requests: list[GenerateRequest], moved: bool = True) -> Right:
        """Requests are over `moved` compositions, or over `unmoved` ones."""
        lookup = self.prefix if moved else self.unmoved
        done = generate(self._model, requests, lookup, self.tasks.end_ids)
        found = measure(exams, [self.tasks.decode(c.token_ids) for c in done])
        return Right(round(found["accuracy"] * found["n"]), found["n"])

    def examined(self) -> Right:
        """The held-out questions, each over its own cartridge."""
        exams = self.tasks.exams
        return self.ask(exams, self.tasks.exam_requests(exams, "bench", "cartridge", 0, False))

    def _single(self, name: str) -> Tensor:
        kind, _, document = name.partition("/")
        if kind == "document":
            return self._cache.get(document)
        bank = self._trainer.bank
        return bank.kv([document])[0].detach().to(self._model.dtype)
