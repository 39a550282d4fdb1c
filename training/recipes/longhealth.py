"""Train on single answers to prompts about a document; measure on five-option questions.

Prompts are token ids, made from patients, tokenizer and config:

    document    <bos> system(document)              position 0 .. T-1     (prefix: cartridge or KV)
    prompt      user(question) + generation prompt   the tokens after any prefix

The chat template is applied to the whole conversation and cut where the document ends. So a prompt
has the same tokens after every prefix, and no second beginning-of-sequence token appears.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from documents.near_duplicates import LocatedText, overlaps
from environments.clinic.longhealth import (
    LETTERS,
    Patient,
    PatientQuestion,
    is_held_out,
    load_patients,
    parse_patients,
)
from environments.clinic.patients import generate_clinic
from environments.clinic.prompts import (
    option_prompt,
    parse_answer,
    right_answer,
    self_study_prompt,
    sentence_ends,
)
from environments.renderer import NO_DOCUMENT, ChatRenderer
from protocols.errors import DataError
from protocols.records.answers import Answer, KeepAnswers, hash_of, mean_nll
from protocols.records.intervals import wilson_interval
from protocols.records.run_files import MeasuredAccuracy
from protocols.seeds import stream_seed
from protocols.spec.learn import LearnSpec
from protocols.spec.sections import DataSpec
from protocols.teacher_replay import AgentMessage
from protocols.train_batch import TrainBatch
from protocols.types import GenerateRequest, PrefixRef, Sampling, composed_ref
from services.run_directory import RunDirectory
from training.recipes.base import Recipe, Route, own_cartridge
from training.rollouts import (
    Rollout,
    ScoreGroup,
    StudyPrompt,
    TimedGenerate,
    as_rollout,
    as_rows,
    handed_over,
    unheard,
)

OFFLINE_CHUNK = 4  # steps of teacher-written text generated in one call
Turn = TypeVar("Turn")


class LongHealthRecipe(Recipe):
    """Train on self-study prompts about patients' charts."""

    def __init__(self, tasks: LongHealthPrompts, *, measured: bool) -> None:
        """Need no held-out question unless `measured`."""
        self._tasks = tasks
        self._exams = tasks.exams if measured else []
        self.documents: Mapping[str, tuple[int, ...]] = tasks.documents
        self.texts = {name: (p.document,) for name, p in tasks.patients.items()}
        self.end_ids = tasks.end_ids

    def prepare(self, step: int) -> None:
        self._tasks.prepare(step)

    async def sample(
        self, step: int, version: int, generate: TimedGenerate, ended: ScoreGroup = unheard
    ) -> Rollout:
        begun = time.perf_counter()
        prompts = self._tasks.rollout(step, version)
        requests = [p.request for p in prompts]
        completions, compute = await generate(requests, handed_over(prompts, ended))
        seconds = time.perf_counter() - begun
        return as_rollout(step, prompts, completions, seconds, compute, False)

    async def offline(self, first: int, generate: TimedGenerate) -> list[Rollout]:
        """Return the teacher's answers to the prompts of the next OFFLINE_CHUNK steps."""
        steps = range(first, first + OFFLINE_CHUNK)
        prompts = [self._tasks.offline(s) for s in steps]
        flat = [p for step in prompts for p in step]
        begun = time.perf_counter()
        completions, compute = await generate([p.request for p in flat])
        seconds = (time.perf_counter() - begun) / OFFLINE_CHUNK
        found = []
        for i, step in enumerate(steps):
            share = slice(i * len(prompts[i]), (i + 1) * len(prompts[i]))
            found.append(
                as_rollout(
                    step, prompts[i], completions[share], seconds, compute / OFFLINE_CHUNK, True
                )
            )
        return found

    async def measure(
        self, arm: str, prefix: str, version: int, *, most: int | None, sampled: bool,
        generate: TimedGenerate, keep: KeepAnswers | None = None, route: Route = own_cartridge,
    ) -> MeasuredAccuracy:  # fmt: skip
        exams = self._exams[:most]
        requests = self._tasks.exam_requests(exams, arm, prefix, version, sampled, route)
        completions, _ = await generate(requests)
        said = [self._tasks.decode(c.token_ids) for c in completions]
        if keep is not None:
            nll: list[float | None] = [None] * len(exams)
            if not sampled:  # it does not depend on what was sampled
                readings, tokens = self._tasks.readings(exams, requests)
                read, _ = await generate(readings)
                nll = [mean_nll(c, n) for c, n in zip(read, tokens, strict=True)]
            spent = [len(c.token_ids) for c in completions]
            keep(self._tasks.answers(exams, said, spent, nll))
        return measure(exams, said)

    async def lesson(self, rollout: Rollout, version: int) -> TrainBatch:
        return TrainBatch(doc=tuple(rollout.samples))

    def record(self, rollout: Rollout, arm: str, step: int, directory: RunDirectory) -> None:
        directory.append_rollouts(as_rows(rollout, arm, step, self._tasks.decode))


@dataclass(frozen=True)
class LongHealthQuestion:
    """Hold a held-out question: its `text`, its ids after a prefix, and `bare_ids` without one."""

    question: PatientQuestion
    text: str
    prompt_ids: tuple[int, ...]
    bare_ids: tuple[int, ...]


def read_patients(data: DataSpec) -> list[Patient]:
    """Return the run's patients, from `data.path` or generated. Raises DataError when too few."""
    if data.path is not None:
        patients = load_patients(data.path)
    else:
        assert data.facts is not None
        assert data.notes is not None
        clinic = generate_clinic(
            data.seed, data.patients, data.facts, data.notes, data.questions_per_fact
        )
        patients = parse_patients(clinic, f"the clinic of seed {data.seed}")
    if len(patients) < data.patients:
        raise DataError(
            f"data.patients is {data.patients} and {data.path} holds {len(patients)}; lower it"
        )
    return patients[: data.patients]


class LongHealthPrompts:
    """Make every prompt of a run. A generator named by seed, step and index makes each draw."""

    def __init__(self, spec: LearnSpec, patients: Sequence[Patient], tokenizer: Any) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self.patients = {p.id: p for p in patients}
        self.conversation = ChatRenderer(tokenizer, {p.id: p.document for p in patients})
        held_out = {
            p.id: [q for q in p.questions if is_held_out(q, spec.data.held_out)] for p in patients
        }
        near = _doubles(patients, held_out, spec.evaluate.alike)
        self._training = {
            p.id: [q for q in p.questions if q not in held_out[p.id] and q.id not in near]
            for p in patients
        }
        self._held_out = held_out
        self._prepared: dict[int, list[StudyPrompt]] = {}
        self._ends = sorted({end for p in patients for end in sentence_ends(p)})
        self.documents = {p.id: self.conversation.head(p.id) for p in patients}
        self.documents[NO_DOCUMENT] = self.conversation.head(None)

    @property
    def end_ids(self) -> frozenset[int]:
        """Return the tokens that end a response."""
        return frozenset({self._tokenizer.eos_token_id})

    def decode(self, ids: Sequence[int]) -> str:
        """Return a response's text without special tokens, for people and for answer parsing."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text.strip()

    def rollout(self, step: int, version: int) -> list[StudyPrompt]:
        """Return the on-policy prompts of 0-based `step`, over cartridge `version`."""
        prompts = self._prepared.pop(step, None) or self._prompts("on_policy", step)
        train = self._spec.train
        return in_company(prompts, version, sorted(self.patients), train.compose, train.seed)

    def prepare(self, step: int) -> None:
        """Make the on-policy prompts of `step` beforehand, while the models work."""
        self._prepared = {step: self._prompts("on_policy", step)}

    def offline(self, step: int) -> list[StudyPrompt]:
        """Return the prompts of `step` over the documents themselves, for the document teacher."""
        return self._prompts("offline", step, self._spec.train.offline_texts)

    def _prompts(self, arm: str, step: int, texts: int | None = None) -> list[StudyPrompt]:
        """Return one step's prompts over the documents, which take turns: with as many prompts as
        documents, every cartridge trains in every step. The draws repeat after `texts` steps, and
        with them the answers, which a request's seed decides."""
        drawn = step if texts is None else step % texts
        rollout, seed = self._spec.rollout, self._spec.train.seed
        ids = sorted(self.patients)
        prompts = []
        for i in range(rollout.prompts):
            document = ids[(drawn * rollout.prompts + i) % len(ids)]
            # The prompt does not depend on the arm: both arms study the same material.
            rng = random.Random(f"prompt/{seed}/{drawn}/{i}")
            kind, text = self_study_prompt(
                self.patients[document], self._training[document], rollout.kinds, rng, self._ends
            )
            name = f"{arm}/{step + 1}/{i}"
            request = GenerateRequest(
                id=name,
                prompt_ids=self._prompt_ids(document, text),
                prefix=PrefixRef(f"document/{document}", 0),
                sampling=Sampling(
                    rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_tokens
                ),
                seed=stream_seed(f"sample/{seed}/{arm}/{drawn + 1}/{i}"),
            )
            prompts.append(StudyPrompt(document, kind, request))
        return prompts

    @cached_property
    def exams(self) -> list[LongHealthQuestion]:
        """Return the held-out questions to evaluate, patients in turn, at most
        `evaluate.questions`. Raises DataError when there is none."""
        by_patient = [list(self._held_out[p]) for p in sorted(self._held_out)]
        chosen = in_turns(by_patient)[: self._spec.evaluate.questions]
        if not chosen:
            raise DataError(
                "no held-out question: raise data.held_out (the share kept for evaluation) or "
                "give more questions"
            )
        exams = []
        for q in chosen:
            text = option_prompt(q.text, q.options, self._spec.data.instruction)
            over, bare = self._prompt_ids(q.patient, text), self._prompt_ids(None, text)
            exams.append(LongHealthQuestion(q, text, over, bare))
        return exams

    def exam_requests(
        self,
        exams: Sequence[LongHealthQuestion],
        arm: str,
        prefix: str,
        version: int,
        sampled: bool,
        route: Route = own_cartridge,
    ) -> list[GenerateRequest]:
        """Return one arm's requests: prefix "cartridge", "document" or "none" (no document)."""
        evaluate, seed = self._spec.evaluate, self._spec.train.seed
        sampling = Sampling(
            temperature=evaluate.temperature if sampled else 0.0, max_tokens=evaluate.max_tokens
        )
        requests = []
        for exam in exams:
            bare = prefix == NO_DOCUMENT
            ref = (
                PrefixRef(f"document/{NO_DOCUMENT}", 0)
                if bare
                else PrefixRef(f"{prefix}/{route(exam.question.patient, exam.text)}", version)
            )
            name = f"evaluate/{arm}/{exam.question.id}"
            ids = exam.bare_ids if bare else exam.prompt_ids
            # The draw does not depend on the arm, so that arms differ by their prefix alone.
            draw = stream_seed(f"exam/{seed}/{exam.question.id}")
            requests.append(GenerateRequest(name, ids, ref, sampling, draw))
        return requests

    def readings(
        self, exams: Sequence[LongHealthQuestion], requests: Sequence[GenerateRequest]
    ) -> tuple[list[GenerateRequest], list[int]]:
        """Return requests that read the right answers after the prompts of `requests`, and how many
        tokens each of these answers has."""
        found, tokens = [], []
        for exam, request in zip(exams, requests, strict=True):
            ids = self.conversation.saying(right_answer(exam.question))
            found.append(reading(request, ids))
            tokens.append(len(ids))
        return found, tokens

    def answers(
        self,
        exams: Sequence[LongHealthQuestion],
        said: Sequence[str],
        tokens: Sequence[int],
        nll: Sequence[float | None] | None = None,
    ) -> list[Answer]:
        """Return the records of an arm's answers: texts, their tokens, losses of the right ones."""
        found = []
        lost = nll or [None] * len(exams)
        for exam, text, count, loss in zip(exams, said, tokens, lost, strict=True):
            q = exam.question
            letter = parse_answer(text, q)
            document = self.patients[q.patient].document
            found.append(
                Answer(
                    id=q.id, fact=q.text, document=q.patient, document_hash=hash_of(document),
                    question_hash=hash_of(exam.text, q.correct), text=text,
                    answer=None if letter is None else q.options[LETTERS.index(letter)],
                    expected=q.correct, right=float(letter is not None and q.is_correct(letter)),
                    nll=loss, tokens=count,
                )
            )  # fmt: skip
        return found

    def _prompt_ids(self, document: str | None, text: str) -> tuple[int, ...]:
        return self.conversation.opening(document, (AgentMessage("user", text),))


def _doubles(
    patients: Sequence[Patient], held_out: Mapping[str, Sequence[PatientQuestion]], alike: float
) -> set[str]:
    """Return ids of questions that nearly repeat a held-out one on the same patient."""
    asked = [LocatedText(p, q.text, q.id) for p, some in held_out.items() for q in some]
    every = [LocatedText(p.id, q.text, q.id) for p in patients for q in p.questions]
    near = {(x.training.document, x.training.text) for x in overlaps(every, asked, alike)}
    return {q.place for q in every if (q.document, q.text) in near}


def in_company(
    prompts: Sequence[StudyPrompt], version: int, names: Sequence[str], share: float, seed: int
) -> list[StudyPrompt]:
    """Return the prompts over their documents' cartridges of `version`; for about `share` of them,
    the cartridge of another of `names` stands before or after it."""
    found = []
    for prompt in prompts:
        rng = random.Random(f"compose/{seed}/{prompt.request.id}")
        order = [prompt.document]
        others = [name for name in names if name != prompt.document]
        if rng.random() < share and others:
            order.insert(rng.randrange(2), rng.choice(others))
        refs = [PrefixRef(f"cartridge/{name}", version) for name in order]
        found.append(over(prompt, composed_ref(refs)))
    return found


def over(prompt: StudyPrompt, prefix: PrefixRef) -> StudyPrompt:
    """Return the prompt with another prefix."""
    return replace(prompt, request=replace(prompt.request, prefix=prefix))


def reading(request: GenerateRequest, answer_ids: tuple[int, ...]) -> GenerateRequest:
    """Return a request for the log-probabilities of `answer_ids` after the prompt of another."""
    return replace(
        request, id=f"{request.id}/read", prompt_ids=(*request.prompt_ids, *answer_ids),
        sampling=Sampling(temperature=0.0, max_tokens=1), seed=0, prompt_logprobs=True,
    )  # fmt: skip


def in_turns(rows: Sequence[Sequence[Turn]]) -> list[Turn]:
    """Return items column by column; rows may end early: [[a, b], [c]] -> [a, c, b]."""
    longest = max((len(r) for r in rows), default=0)
    return [r[i] for i in range(longest) for r in rows if i < len(r)]


def measure(exams: Sequence[LongHealthQuestion], answers: Sequence[str]) -> MeasuredAccuracy:
    """Return accuracy with its 95% Wilson interval; unparsed answers count as wrong."""
    letters = [parse_answer(a, e.question) for e, a in zip(exams, answers, strict=True)]
    right = sum(
        letter is not None and e.question.is_correct(letter)
        for e, letter in zip(exams, letters, strict=True)
    )
    low, high = wilson_interval(right, len(exams))
    return MeasuredAccuracy(
        accuracy=right / len(exams),
        ci95=[low, high],
        n=len(exams),
        parse_failures=sum(letter is None for letter in letters),
    )
