"""Train on documents with self-study questions only: a user's own, or LongHealth's charts.

    questions   A writes questions about passages (documents.synthesis); of a user's documents some
                are held out by the hash of their words
    step        other questions -> answers on policy -> doc_kl of the teacher
    measure     training.recipes.study_exam

Neither the held-out questions nor those of the user are trained on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.chat.rollouts import drawn_steps
from cartridge_forge.plugins.documents.corpus import Corpus
from cartridge_forge.plugins.documents.drafts import SynthesisPlan
from cartridge_forge.plugins.documents.near_duplicates import LocatedText, clean, overlaps
from cartridge_forge.plugins.documents.rows.checks import note_rows, require_plain
from cartridge_forge.plugins.documents.rows.reading import RowSet, read_row_set
from cartridge_forge.plugins.documents.rows.records import DatasetRow
from cartridge_forge.plugins.documents.spec.documents import SelfStudySpec
from cartridge_forge.plugins.documents.spec.learn import DocumentsLearn
from cartridge_forge.plugins.documents.spec.rows import ROW_SOURCES
from cartridge_forge.plugins.documents.study.agreement import StudyQuestion, split
from cartridge_forge.plugins.documents.study.exam import StudyExam
from cartridge_forge.plugins.documents.study.material import read_material, row_corpus
from cartridge_forge.plugins.documents.study.prompts import (
    composition_choice,
    context_choice,
    over_cartridges,
    texts_of,
)
from cartridge_forge.plugins.documents.study.question_files import UserQuestion
from cartridge_forge.plugins.documents.study.rows import (
    completion_of_row,
    context_titles,
    gains,
    note_documents,
    of_parts,
    require_scores,
    require_study,
    row_question,
    studied_of,
    user_question,
    weighed,
)
from cartridge_forge.plugins.documents.study.verified import offline_text, opened, trained_marks
from cartridge_forge.plugins.documents.synthesis import model_name, read_rows, write_study
from cartridge_forge.plugins.documents.synthesis_rows import StudyRow
from cartridge_forge.plugins.statistics.gold import gold_results
from cartridge_forge.plugins.strategies.samplers.token_sampler import TokenSampler
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.files import json_lines, write_atomically
from cartridge_forge.protocols.records.answers import KeepAnswers
from cartridge_forge.protocols.records.run_files import ArmResult, MeasuredAccuracy
from cartridge_forge.protocols.step import (
    BARE,
    NO_DOCUMENT,
    GenerateRequest,
    PrecomputedScores,
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
    is_offline,
    no_scoring,
    score_callback,
    with_likeliest,
    with_title,
)


class DocumentsRecipe(Recipe):
    """Train on the documents of the spec; write their questions into the run's directory. The
    questions `asked` are never trained on."""

    def __init__(
        self, spec: DocumentsLearn, parts: Corpus, asked: Sequence[UserQuestion], tokenizer: Any,
        directory: RunDirectory, rows: RowSet | None = None, mesh: Mesh | None = None,
    ) -> None:  # fmt: skip
        """Take the questions of a dataset's `rows` where they are given, and write none."""
        assert spec.self_study is not None
        self._spec, self._study, self._parts = spec, spec.self_study, parts
        self._student_top = spec.teacher.student_top
        self._directory, self._model = directory, model_name(spec.model.path)
        self.layout = parts.layout
        self._titles, self._tokenizer = context_titles(spec, parts), tokenizer
        self._conversation = ChatRenderer(tokenizer, parts.texts, directory.date)
        self.documents: Mapping[str, tuple[int, ...]] = {
            **{name: self._conversation.head(name) for name in parts.parts},
            NO_DOCUMENT: self._conversation.head(None),
        }
        self.texts = texts_of(parts.layout, parts.texts)
        self._choose = context_choice(spec, parts.layout, parts.texts, self.documents)
        self._compose = composition_choice(spec, self.texts)
        self.end_ids, self.note = self._conversation.end_ids, self._conversation.note
        self._sampling = None if mesh is None else opened(spec, mesh, self.end_ids)
        self._rows = rows
        self._exam = StudyExam(spec, parts, self._conversation, self._titles, asked, tokenizer)
        self._getting_ready = asyncio.Lock()
        self._training: dict[str, list[StudyQuestion]] = {}
        note_documents(parts, directory)
        if rows is not None:
            self._take(rows)

    # -- questions ------------------------------------------------------------------------------

    async def _ready(self, generate: GenerateCall) -> None:
        """Read or write the self-study questions, once."""
        async with self._getting_ready:
            if self._training:
                return
            if self._study.rows is not None:
                rows = of_parts(read_rows(Path(self._study.rows)), self._parts, self._study.rows)
                require_study(rows, self._study.rows, self._tokenizer)
            else:
                rows = await self._write(generate)
            if self._study.least_gain is not None:
                rows = await self._with_gain(rows, self._study.least_gain, generate)
            found = (
                studied_of(r, self._spec, self._conversation, self._titles, self._model)
                for r in rows
                if r.kept
            )
            data = self._spec.data
            # Of LongHealth, data.held_out is a share of its own questions.
            share = 0.0 if data.source == "longhealth" else data.held_out
            training, held_out = split(filter(None, found), share)
            lacking = [name for name in self._parts.parts if not training.get(name)]
            if lacking or not (held_out or self._exam.asked):
                raise DataError(
                    f"self-study has no question to train on about {lacking or 'any document'}: "
                    "raise self_study.questions, lower data.held_out or self_study.least_gain, set "
                    "self_study.plain: true, or raise train.row_tokens, which holds a question and "
                    "its answer"
                )
            if self._study.scores == "stored":
                require_scores([s for pool in training.values() for s in pool], self._study.rows)
            self._require_clean(training, held_out)
            self._exam.held_out = held_out[: self._spec.evaluate.questions]
            self._training = training

    def _take(self, rows: RowSet) -> None:
        """Train on the rows that are not held out. Held-out rows with an answer decide the
        accuracy, the others the agreement with the teacher. Raises DataError where none is left."""

        def question(row: DatasetRow) -> StudyQuestion | None:
            return row_question(row, self._spec, self._parts, self._conversation, self._titles)

        training: dict[str, list[StudyQuestion]] = {}
        for studied in filter(None, map(question, rows.training)):
            training.setdefault(studied.document, []).append(studied)
        held_out = [(s, row) for row in rows.held_out if (s := question(row)) is not None]
        if not training or not held_out:
            raise DataError(
                f"no row of {rows.source} fits train.row_tokens "
                f"({self._spec.train.row_tokens}) with rollout.max_tokens "
                f"({self._spec.rollout.max_tokens}); raise it"
            )
        most = self._spec.evaluate.questions
        self._exam.asked = [user_question(s, row) for s, row in held_out if row.answer is not None]
        self._exam.held_out = [s for s, row in held_out if row.answer is None][:most]
        self._training = training

    def _require_clean(
        self, training: Mapping[str, Sequence[StudyQuestion]], held_out: Sequence[StudyQuestion]
    ) -> None:
        """Raise DataError, as `clean` does, before anything is trained."""
        evaluate = self._spec.evaluate
        trained = [
            LocatedText(self._exam.document(s.document), message.content, f"self-study: {s.key}")
            for pool in training.values()
            for s in pool
            for message in s.messages
        ]
        key = "data.questions" if self._spec.data.questions else "data.path"
        asked = [
            LocatedText(self._exam.document(q.document), text, f"{key}: {q.id}")
            for q in self._exam.asked
            for text in q.forms
        ] or [
            LocatedText(
                self._exam.document(s.document), s.messages[-1].content, f"held out: {s.key}"
            )
            for s in held_out
        ]
        clean(
            overlaps(trained, asked, evaluate.alike),
            evaluate.contamination or ("fail" if self._exam.asked else "warn"),
            self._directory.contamination,
        )

    async def _write(self, generate: GenerateCall) -> list[StudyRow]:
        sampler = TokenSampler(generate, self._conversation, None, BARE)
        plan = SynthesisPlan(self._study, self._model, self._spec.train.seed, answers=False)
        return await write_study(
            self._directory.selfstudy, list(self._parts.parts.values()), plan, sampler
        )

    async def _with_gain(
        self, rows: list[StudyRow], least: float, generate: GenerateCall
    ) -> list[StudyRow]:
        """Return the rows with their gains, which the run's own file keeps."""
        asked = [r for r in rows if r.kept and r.gain is None]
        read = (
            studied_of(r, self._spec, self._conversation, self._titles, self._model) for r in asked
        )
        studied = [s for s in read if s is not None]
        bare = {s.key: self._exam.prompt_ids(s.document, s.messages, bare=True) for s in studied}
        found = weighed(rows, await gains(studied, bare, generate), least)
        if self._study.rows is None:
            lines = json_lines(row.as_dict() for row in found)
            write_atomically(self._directory.selfstudy, lines)
        return found

    def _prompts(self, arm: str, step: int) -> list[tuple[StudyQuestion, StudyPrompt]]:
        """Return a step's prompts: contexts take turns, each with every cartridge that learns from
        it; their questions are reshuffled each round."""
        rollout, seed = self._spec.rollout, self._spec.train.seed
        turns = self._turns
        studies, prompts, texts = [], [], []
        for i in range(rollout.prompts):
            number, turn = divmod(step * rollout.prompts + i, len(turns))
            about, cartridge = turns[turn]
            pool = self._training[about]
            lap, place = divmod(number, len(pool))
            order = list(range(len(pool)))
            random.Random(f"questions/{seed}/{about}/{lap}").shuffle(order)
            studied = pool[order[place]]
            text = with_title(self._titles, about, studied.text)
            contexts = self._choose(cartridge, (about,), text)
            name = f"{arm}/{step + 1}/{i}"
            request = GenerateRequest(
                id=name,
                prompt_ids=studied.prompt_ids,
                prefix=context_ref(contexts),
                sampling=Sampling(
                    rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_tokens
                ),
                seed=stream_seed(f"sample/{seed}/{name}"),
            )
            document = self.layout.documents[about]
            prompt = StudyPrompt(document, studied.kind, request, cartridge, contexts, studied.key)
            studies.append(studied)
            prompts.append(prompt)
            texts.append(text)
        return list(zip(studies, self._compose(prompts, texts), strict=True))

    # -- rollouts -------------------------------------------------------------------------------

    @property
    def _turns(self) -> list[tuple[str, str]]:
        """Return every context with each of its cartridges, in the order of their turns; of a
        dataset, those that a row is about."""
        of_rows = self._rows is not None
        return sorted(
            (about, c)
            for c, of in self.layout.contexts.items()
            for about in of
            if not of_rows or about in self._training
        )

    def updates(self, steps: int) -> Mapping[str, int]:
        return drawn_steps([c for _, c in self._turns], self._spec.rollout.prompts, steps)

    async def sample(
        self, step: int, version: int, generate: GenerateCall, ended: ScoreGroup = no_scoring
    ) -> Rollout:
        await self._ready(generate)
        asked = [p for _, p in self._prompts("on_policy", step)]
        prompts = with_likeliest(over_cartridges(asked, version), self._student_top)
        if self._sampling is not None:
            return await self._sampling.rollout(step, prompts, generate, ended)
        requests = [p.request for p in prompts]
        completions = await generate(requests, score_callback(prompts, ended))
        return as_rollout(step, prompts, completions, False)

    async def offline(self, first: int, generate: GenerateCall) -> list[Rollout]:
        """Return one step of answers that model B wrote in the rows; a question without one is
        answered by the model with the whole document."""
        await self._ready(generate)
        prompts = self._prompts("offline", first)
        unsaid = [p for s, p in prompts if not s.answer_ids]
        made = await offline_text(self._sampling, unsaid, generate) if unsaid else []
        fresh = {c.request_id: c for c in made}
        completions = [fresh.get(p.request.id) or completion_of_row(s, p) for s, p in prompts]
        asked = [p for _, p in prompts]
        return [as_rollout(first, asked, completions, True)]

    def repeated(self, rollout: Rollout) -> frozenset[str]:
        """Return the samples with the document's own words or a row's answer, of documents whose
        questions do not last for the run's steps."""
        teacher = self._spec.teacher
        # Kept are a teacher's top entries alone.
        more = teacher.top_k == "full" or teacher.student_top or self._spec.objective.asks_document
        if more or self._study.scores == "stored" or not is_offline(rollout):
            return frozenset()
        rounds = self._spec.train.steps * self._spec.rollout.prompts / len(self._turns)
        return frozenset(
            prompt.request.id
            for studied, prompt in self._prompts("offline", rollout.step)
            if studied.answer_ids and rounds > len(self._training[studied.document])
        )

    async def train_batch(self, rollout: Rollout, version: int) -> TrainBatch:
        stored: tuple[PrecomputedScores, ...] = ()
        if self._study.scores == "stored" and is_offline(rollout):
            asked = enumerate(self._prompts("offline", rollout.step))
            stored = tuple(
                PrecomputedScores(i, s.teacher_ids, s.teacher_logprobs) for i, (s, _) in asked
            )
        return TrainBatch(
            doc=tuple(rollout.samples), doc_stored=stored,
            doc_trained=None if self._sampling is None else trained_marks(rollout.samples),
        )  # fmt: skip

    async def measure(
        self, arm: str, prefix: str, version: int, *, most: int | None, sampled: bool,
        generate: GenerateCall, keep: KeepAnswers | None = None, route: Route = own_cartridge,
    ) -> MeasuredAccuracy:  # fmt: skip
        await self._ready(generate)
        return await self._exam.measure(
            arm, prefix, version, most=most, generate=generate, keep=keep, route=route
        )

    # -- records --------------------------------------------------------------------------------

    def results(self, state: Mapping[str, ArmResult], answers: Iterable[Any]) -> Mapping[str, Any]:
        gold = gold_results(answers)
        return {} if gold is None else {"gold": gold}

    def record(self, rollout: Rollout, arm: str, step: int, directory: RunDirectory) -> None:
        directory.append_rollouts(as_rows(rollout, arm, step, self._exam.decode))


def open_recipe(
    learn: DocumentsLearn, tokenizer: Any, mesh: Mesh, directory: RunDirectory | None
) -> DocumentsRecipe:
    """Return the recipe of a spec with a dataset's rows or with self-study, whose questions it
    writes into the run's `directory`."""
    assert directory is not None
    if learn.data.source not in ROW_SOURCES:
        parts, questions = read_material(learn, tokenizer)
        return DocumentsRecipe(learn, parts, questions, tokenizer, directory, mesh=mesh)
    rows = read_row_set(learn)
    require_plain(rows, tokenizer)
    note_rows(rows, directory)
    learn = learn.model_copy(update={"self_study": SelfStudySpec()})
    corpus = row_corpus(learn, rows, tokenizer)
    return DocumentsRecipe(learn, corpus, (), tokenizer, directory, rows, mesh)
