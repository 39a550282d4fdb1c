"""Train on answers to prompts about patients' charts; measure on five-option questions.

    chart of 900 tokens -> chunks of at most 256, each under the chart's head -> patient_01.part_02

Cuts are between notes, else between sentences (`plugins.documents.chunks`). A prompt is about
passages of the notes, and these lie in one chunk, or in several.

Prompts are token ids, made from patients, tokenizer and config:

    context     <bos> system(chart or chunk)         position 0 .. T-1     (prefix: cartridge or KV)
    prompt      user(question) + generation prompt   the tokens after any prefix

The chat template is applied to the whole conversation and cut where the context ends. So a prompt
has the same tokens after every prefix, and no second beginning-of-sequence token appears. Where one
cartridge holds several charts, a prompt begins with its patient's name.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.chat.rollouts import drawn_steps, hash_of, mean_nll
from cartridge_forge.plugins.clinic.patients import generate_clinic
from cartridge_forge.plugins.clinic.text import (
    LETTERS,
    NoteSpan,
    Patient,
    PatientQuestion,
    is_held_out,
    load_patients,
    option_prompt,
    parse_answer,
    parse_patients,
    right_answer,
    self_study_prompt,
    sentence_ends,
)
from cartridge_forge.plugins.documents.chunks import pieces
from cartridge_forge.plugins.documents.corpus import context_tokens, longest, part_names, tokenised
from cartridge_forge.plugins.documents.near_duplicates import LocatedText, overlaps
from cartridge_forge.plugins.documents.spec.data import DataSpec
from cartridge_forge.plugins.documents.spec.learn import DocumentsLearn
from cartridge_forge.plugins.documents.study.passages import (
    RETRIEVED,
    RETRIEVED_CARTRIDGE,
    PassagePrompts,
)
from cartridge_forge.plugins.documents.study.prompts import (
    answered_over,
    composition_choice,
    context_choice,
    over_cartridges,
    reading,
    texts_of,
    titles_of,
)
from cartridge_forge.plugins.documents.study.verified import (
    VerifiedSampling,
    offline_text,
    opened,
    trained_marks,
)
from cartridge_forge.plugins.statistics.gold import gold_results
from cartridge_forge.plugins.statistics.intervals import wilson_interval
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.layout import layout_of
from cartridge_forge.protocols.records.answers import Answer, KeepAnswers
from cartridge_forge.protocols.records.run_files import ArmResult, MeasuredAccuracy
from cartridge_forge.protocols.step import (
    BARE,
    NO_DOCUMENT,
    GenerateRequest,
    PrefixRef,
    Sampling,
    TrainBatch,
    stream_seed,
)
from cartridge_forge.services.mesh import Mesh
from cartridge_forge.services.run_directory import RunDirectory
from cartridge_forge.training.recipe import Recipe, Route, own_cartridge
from cartridge_forge.training.records import (
    GenerateCall,
    Rollout,
    ScoreGroup,
    StudyPrompt,
    as_rollout,
    as_rows,
    context_ref,
    interleave,
    no_scoring,
    score_callback,
    with_likeliest,
    with_title,
)

OFFLINE_CHUNK = 4  # steps of teacher-written text generated in one call


class LongHealthRecipe(Recipe):
    """Train on self-study prompts about patients' charts."""

    def __init__(
        self, tasks: LongHealthPrompts, *, measured: bool, sampling: VerifiedSampling | None = None
    ) -> None:
        """Need no held-out question unless `measured`. With `sampling` the teacher takes part in
        what is sampled."""
        self._tasks, self._sampling = tasks, sampling
        self._exams = tasks.exams if measured else []
        self.documents: Mapping[str, tuple[int, ...]] = tasks.documents
        self.layout = tasks.layout
        self.texts = texts_of(tasks.layout, tasks.texts)
        self.end_ids, self.note = tasks.end_ids, tasks.conversation.note
        first = next(iter(tasks.layout.contexts.values()))
        asked = (exam.question for exam in self._exams if exam.question.patient in first)
        self.question = next((one.text for one in asked), self.question)

    def prepare(self, step: int) -> None:
        self._tasks.prepare(step)

    def updates(self, steps: int) -> Mapping[str, int]:
        return drawn_steps([c for _, c in self.layout.turns], self._tasks.prompts, steps)

    async def sample(
        self, step: int, version: int, generate: GenerateCall, ended: ScoreGroup = no_scoring
    ) -> Rollout:
        prompts = self._tasks.rollout(step, version)
        if self._sampling is not None:
            return await self._sampling.rollout(step, prompts, generate, ended)
        requests = [p.request for p in prompts]
        completions = await generate(requests, score_callback(prompts, ended))
        return as_rollout(step, prompts, completions, False)

    async def offline(self, first: int, generate: GenerateCall) -> list[Rollout]:
        """Return the teacher's answers to the prompts of the next OFFLINE_CHUNK steps."""
        steps = range(first, first + OFFLINE_CHUNK)
        prompts = [self._tasks.offline(s) for s in steps]
        flat = [p for step in prompts for p in step]
        completions = await offline_text(self._sampling, flat, generate)
        rollouts = []
        for i, step in enumerate(steps):
            share = slice(i * len(prompts[i]), (i + 1) * len(prompts[i]))
            rollouts.append(as_rollout(step, prompts[i], completions[share], True))
        return rollouts

    async def measure(
        self, arm: str, prefix: str, version: int, *, most: int | None, sampled: bool,
        generate: GenerateCall, keep: KeepAnswers | None = None, route: Route = own_cartridge,
    ) -> MeasuredAccuracy:  # fmt: skip
        exams = self._exams[:most]
        requests = self._tasks.exam_requests(exams, arm, prefix, version, sampled, route)
        completions = await generate(requests)
        texts = [self._tasks.decode(c.token_ids) for c in completions]
        if keep is not None:
            nll: list[float | None] = [None] * len(exams)
            if not sampled:  # it does not depend on what was sampled
                readings, tokens = self._tasks.readings(exams, requests)
                read = await generate(readings)
                nll = [mean_nll(c, n) for c, n in zip(read, tokens, strict=True)]
            spent = [len(c.token_ids) for c in completions]
            keep(answered_over(self._tasks.answers(exams, texts, spent, nll), requests))
        return measure(exams, texts)

    async def train_batch(self, rollout: Rollout, version: int) -> TrainBatch:
        marks = None if self._sampling is None else trained_marks(rollout.samples)
        return TrainBatch(doc=tuple(rollout.samples), doc_trained=marks)

    def results(self, state: Mapping[str, ArmResult], answers: Iterable[Any]) -> Mapping[str, Any]:
        gold = gold_results(answers)
        return {} if gold is None else {"gold": gold}

    def record(self, rollout: Rollout, arm: str, step: int, directory: RunDirectory) -> None:
        directory.append_rollouts(as_rows(rollout, arm, step, self._tasks.decode))


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


def open_recipe(
    learn: DocumentsLearn, tokenizer: Any, mesh: Mesh, directory: RunDirectory | None
) -> LongHealthRecipe:
    """Return the recipe of a spec without episodes, rsa, self-study and a dataset's rows."""
    prompts = open_prompts(learn, tokenizer, None if directory is None else directory.date)
    sampling = opened(learn, mesh, prompts.end_ids)
    return LongHealthRecipe(prompts, measured=bool(learn.evaluate.arms), sampling=sampling)


@dataclass(frozen=True)
class LongHealthQuestion:
    """Hold a held-out question: its `text`, its ids after a prefix, and `bare_ids` without one. The
    `contexts` hold its answer."""

    question: PatientQuestion
    text: str
    prompt_ids: tuple[int, ...]
    bare_ids: tuple[int, ...]
    contexts: tuple[str, ...]


def read_patients(data: DataSpec) -> list[Patient]:
    """Return the run's patients, from `data.path` or generated. Raises DataError when too few."""
    if data.path is not None:
        patients = load_patients(data.path)
    else:
        assert data.facts is not None
        assert data.notes is not None
        clinic = generate_clinic(
            data.seed, data.patients, data.facts, data.notes, data.questions_per_fact,
            data.own_fields,
        )  # fmt: skip
        patients = parse_patients(clinic, f"the clinic of seed {data.seed}")
    if len(patients) < data.patients:
        raise DataError(
            f"data.patients is {data.patients} and {data.path} holds {len(patients)}; lower it"
        )
    return patients[: data.patients]


def open_prompts(
    spec: DocumentsLearn, tokenizer: Any, date: datetime | None = None
) -> LongHealthPrompts:
    """Return the prompts of a run about its patients, whose charts are cut to the model's context;
    `date` is the run's. Raises DataError for too few patients or a context that is too short."""
    most = longest(spec, context_tokens(spec.model.path))
    return LongHealthPrompts(spec, read_patients(spec.data), tokenizer, most, date)


class LongHealthPrompts:
    """Make every prompt of a run. A generator named by seed, step and index makes each draw."""

    def __init__(
        self,
        spec: DocumentsLearn,
        patients: Sequence[Patient],
        tokenizer: Any,
        most: int | None = None,
        date: datetime | None = None,
    ) -> None:
        """Cut charts into chunks of at most `most` tokens, None: not at all. `date` is the one that
        the chat template may write, None for now."""
        self._spec = spec
        self._student_top = spec.teacher.student_top
        self._tokenizer = tokenizer
        self.patients = {p.id: p for p in patients}
        overlap = spec.documents.overlap
        self._chunks = {p.id: chart_chunks(p, tokenizer, most, overlap) for p in patients}
        self.texts = {c.name: c.text for chunks in self._chunks.values() for c in chunks}
        owners = {c.name: patient for patient, chunks in self._chunks.items() for c in chunks}
        self.layout = layout_of(spec.cartridge, owners)
        names = {p.id: p.name for p in patients}
        self.titles = titles_of(spec.data, self.layout, names)
        self.conversation = ChatRenderer(tokenizer, self.texts, date)
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
        self._ends = tuple(sorted({end for p in patients for end in sentence_ends(p)}))
        # A choice draws its options anew; the other kinds ask the same again and again.
        self._repeated_ids = lru_cache(maxsize=4096)(self._prompt_ids)
        self.documents = {name: self.conversation.head(name) for name in self.texts}
        self.documents[NO_DOCUMENT] = self.conversation.head(None)
        self._choose = context_choice(spec, self.layout, self.texts, self.documents)
        self._compose = composition_choice(spec, texts_of(self.layout, self.texts))
        self._passages = PassagePrompts(
            self.layout, self.texts, tokenizer, self.conversation, spec.cartridge.tokens,
            spec.evaluate.arms, spec.evaluate.retriever,
        )  # fmt: skip

    @property
    def end_ids(self) -> frozenset[int]:
        """Return the tokens that end a response."""
        return self.conversation.end_ids

    @property
    def prompts(self) -> int:
        """Return the prompts of a step."""
        return self._spec.rollout.prompts

    def decode(self, ids: Sequence[int]) -> str:
        """Return a response's text without special tokens, for people and for answer parsing."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text.strip()

    def rollout(self, step: int, version: int) -> list[StudyPrompt]:
        """Return the on-policy prompts of 0-based `step`, over cartridge `version`."""
        prompts = self._prepared.pop(step, None) or self._prompts("on_policy", step)
        return with_likeliest(over_cartridges(prompts, version), self._student_top)

    def prepare(self, step: int) -> None:
        """Make the on-policy prompts of `step` beforehand, while the models work."""
        self._prepared = {step: self._prompts("on_policy", step)}

    def offline(self, step: int) -> list[StudyPrompt]:
        """Return the prompts of `step` over the documents themselves, for the document teacher."""
        return self._prompts("offline", step, self._spec.train.offline_texts)

    def _prompts(self, arm: str, step: int, texts: int | None = None) -> list[StudyPrompt]:
        """Return one step's prompts over their contexts. The documents take turns, each with every
        cartridge that learns from it: with as many prompts, all of them train in every step. The
        draws repeat after `texts` steps, and with them the answers, which a request's seed decides.
        """
        drawn = step if texts is None else step % texts
        rollout, seed = self._spec.rollout, self._spec.train.seed
        turns = self.layout.turns
        sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_tokens)
        prompts, texts_asked = [], []
        for i in range(rollout.prompts):
            document, cartridge = turns[(drawn * rollout.prompts + i) % len(turns)]
            # The prompt does not depend on the arm: both arms study the same material.
            rng = random.Random(f"prompt/{seed}/{drawn}/{i}")
            kind, text, places = self_study_prompt(
                self.patients[document], self._training[document], rollout.kinds, rng, self._ends
            )
            asked = with_title(self.titles, document, text)
            contexts = self._choose(cartridge, self.contexts_of(document, places), asked)
            name = f"{arm}/{step + 1}/{i}"
            ids_of = self._prompt_ids if kind == "choice" else self._repeated_ids
            request = GenerateRequest(
                id=name,
                prompt_ids=ids_of(contexts[0], asked),
                prefix=context_ref(contexts),
                sampling=sampling,
                seed=stream_seed(f"sample/{seed}/{arm}/{drawn + 1}/{i}"),
            )
            key = f"{document}/{hash_of(text)}"
            prompts.append(StudyPrompt(document, kind, request, cartridge, contexts, key))
            texts_asked.append(asked)
        return self._compose(prompts, texts_asked)

    def contexts_of(self, document: str, places: Sequence[NoteSpan]) -> tuple[str, ...]:
        """Return the contexts that hold these passages of a chart."""
        return chunks_holding(self._chunks[document], places)

    @cached_property
    def exams(self) -> list[LongHealthQuestion]:
        """Return the held-out questions to evaluate, patients in turn, at most
        `evaluate.questions`. Raises DataError when there is none."""
        by_patient = [list(self._held_out[p]) for p in sorted(self._held_out)]
        chosen = interleave(by_patient)[: self._spec.evaluate.questions]
        if not chosen:
            raise DataError(
                "no held-out question: raise data.held_out (the share kept for evaluation) or "
                "give more questions"
            )
        exams = []
        for q in chosen:
            contexts = self.contexts_of(q.patient, self.patients[q.patient].places_of(q))
            text = with_title(self.titles, q.patient, self._option_text(q))
            over, bare = self._prompt_ids(contexts[0], text), self._prompt_ids(None, text)
            exams.append(LongHealthQuestion(q, text, over, bare, contexts))
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
        """Return one arm's requests: prefix "cartridge", "document" or "none" (no document). Those
        of the arms over passages hold them in the prompt."""
        evaluate, seed = self._spec.evaluate, self._spec.train.seed
        sampling = Sampling(
            temperature=evaluate.temperature if sampled else 0.0, max_tokens=evaluate.max_tokens
        )
        requests = []
        for exam in exams:
            bare = prefix == NO_DOCUMENT
            cartridge = self.layout.cartridge_of(exam.question.patient)
            ref = BARE
            if prefix == "document":
                ref = context_ref(exam.contexts)
            elif not bare:
                ref = PrefixRef(f"{prefix}/{route(cartridge, exam.text)}", version)
            name = f"evaluate/{arm}/{exam.question.id}"
            ids = exam.bare_ids if bare else exam.prompt_ids
            message = (AgentMessage("user", exam.text),)
            if arm == RETRIEVED:
                ids, ref = self._passages.as_document(cartridge, message)
            elif arm == RETRIEVED_CARTRIDGE:
                ids = self._passages.before_question(cartridge, exam.contexts[0], message)
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
            ids = self.conversation.saying(right_answer(exam.question, exam.text))
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
                    question_hash=hash_of(self._option_text(q), q.correct), text=text,
                    answer=None if letter is None else q.options[LETTERS.index(letter)],
                    expected=q.correct, right=float(letter is not None and q.is_correct(letter)),
                    nll=loss, tokens=count, cartridge=self.layout.cartridge_of(q.patient),
                    contexts=exam.contexts,
                )
            )  # fmt: skip
        return found

    def _option_text(self, question: PatientQuestion) -> str:
        return option_prompt(question.text, question.options, self._spec.data.instruction)

    def _prompt_ids(self, context: str | None, text: str) -> tuple[int, ...]:
        return self.conversation.opening(context, (AgentMessage("user", text),))


def _doubles(
    patients: Sequence[Patient], held_out: Mapping[str, Sequence[PatientQuestion]], alike: float
) -> set[str]:
    """Return ids of questions that nearly repeat a held-out one on the same patient."""
    asked = [LocatedText(p, q.text, q.id) for p, some in held_out.items() for q in some]
    every = [LocatedText(p.id, q.text, q.id) for p in patients for q in p.questions]
    near = {(x.training.document, x.training.text) for x in overlaps(every, asked, alike)}
    return {q.place for q in every if (q.document, q.text) in near}


BETWEEN = "\n\n"  # notes, while they are cut: a better place than the end of a sentence


@dataclass(frozen=True)
class ChartChunk:
    """Hold what the teacher reads of a chart: its `text`, made of these passages of the notes."""

    name: str
    text: str
    spans: tuple[NoteSpan, ...]


def chart_chunks(
    patient: Patient, tokenizer: Any, most: int | None, overlap: int
) -> list[ChartChunk]:
    """Return a chart as chunks of at most `most` tokens (None: as one), each of which repeats up to
    `overlap` tokens of the one before it. Raises DataError where the head leaves no room."""
    room = most
    while True:
        found = _cut(patient, tokenizer, room, overlap)
        if most is None or room is None:
            return found
        over = max(_tokens(tokenizer, chunk.text, most) for chunk in found) - most
        if over <= 0:
            return found
        room -= over
        if room <= 2 * overlap:
            raise DataError(
                f"a chunk of {most} tokens has no room beside the head of {patient.id}'s chart; "
                "raise teacher.context_tokens, or lower documents.overlap"
            )


def _cut(patient: Patient, tokenizer: Any, room: int | None, overlap: int) -> list[ChartChunk]:
    """Return chunks of at most `room` tokens without the head and the notes' numbers."""
    whole = tuple((i, 0, len(text)) for i, text in enumerate(patient.texts))
    one = ChartChunk(patient.id, patient.document, whole)
    if room is None or _tokens(tokenizer, one.text, room) <= room:
        return [one]
    body = tokenised(tokenizer, BETWEEN.join(patient.texts))
    starts = [sum(len(t) + len(BETWEEN) for t in patient.texts[:i]) for i, _, _ in whole]
    cut = pieces(body, room, overlap)
    found = []
    for name, chunk in zip(part_names(patient.id, len(cut)), cut, strict=True):
        spans = tuple(
            (note, max(0, chunk.start_char - first), min(stop, chunk.stop_char - first))
            for (note, _, stop), first in zip(whole, starts, strict=True)
            if chunk.start_char < first + stop and first < chunk.stop_char
        )
        found.append(ChartChunk(name, patient.excerpt(spans), spans))
    return found


def _tokens(tokenizer: Any, text: str, enough: int) -> int:
    """Return the tokens of a text, at least; a text of at most `enough` bytes is not tokenized, for
    no token is less than a byte."""
    size = len(text.encode())
    return size if size <= enough else len(tokenised(tokenizer, text))


def chunks_holding(chunks: Sequence[ChartChunk], places: Sequence[NoteSpan]) -> tuple[str, ...]:
    """Return the chunks that hold these passages, in order: of each the first chunk that holds it
    whole, else all that hold a part of it."""
    found: set[str] = set()
    for note, start, stop in places:
        held = [(c.name, a, b) for c in chunks for at, a, b in c.spans if at == note]
        whole = [name for name, a, b in held if a <= start and stop <= b]
        found |= set(whole[:1] or [name for name, a, b in held if start < b and a < stop])
    return tuple(chunk.name for chunk in chunks if chunk.name in found)
