"""Train on a user's own documents, with self-study questions only.

    questions   A writes questions about passages (documents.synthesis); some are held out by the
                hash of their words
    step        other questions -> answers on policy -> doc_kl of the teacher
    measure     held-out questions: the teacher's own sampled answers, read by each arm

For an answer y sampled by the teacher T, the sum of log T(y_t) - log S(y_t) is an unbiased estimate
of KL(T || S). It needs only the arm S's log-probabilities of y, and is reported per token, with the
share of tokens at which both have the same likeliest token.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from documents.corpus import Corpus
from documents.near_duplicates import LocatedText, overlaps
from documents.synthesis import SynthesisPlan, model_name, read_rows, write_study
from documents.synthesis_rows import StudyRow
from environments.renderer import NO_DOCUMENT, ChatRenderer
from environments.rollout import BARE
from protocols.errors import CheckpointError, DataError
from protocols.files import write_atomically
from protocols.records.answers import KeepAnswers, hash_of, mean_nll
from protocols.records.run_files import MeasuredAccuracy
from protocols.seeds import stream_seed
from protocols.spec.learn import LearnSpec
from protocols.teacher_replay import AgentMessage
from protocols.train_batch import PrecomputedScores, TrainBatch
from protocols.types import Completion, GenerateRequest, PrefixRef, Sampling
from services.run_directory import RunDirectory
from strategies.samplers.token_sampler import TokenSampler
from training.recipes.agreement import (
    HeldOutQuestion,
    StudyQuestion,
    agreement,
    answered,
    split,
    teachers_answer,
    users_answer,
)
from training.recipes.base import Recipe, Route, own_cartridge
from training.recipes.contamination import clean
from training.recipes.longhealth import in_company, in_turns, reading
from training.recipes.question_files import UserQuestion, read_questions
from training.rollouts import (
    Rollout,
    ScoreGroup,
    StudyPrompt,
    TimedGenerate,
    as_rollout,
    as_rows,
    handed_over,
    is_offline,
    unheard,
)


class DocumentsRecipe(Recipe):
    """Train on the documents of the spec; write their questions into the run's directory."""

    def __init__(
        self, spec: LearnSpec, parts: Corpus, tokenizer: Any, directory: RunDirectory
    ) -> None:
        assert spec.self_study is not None
        self._spec, self._study, self._parts = spec, spec.self_study, parts
        self._directory, self._model = directory, model_name(spec.model.path)
        self._conversation = ChatRenderer(tokenizer, parts.texts)
        self.documents: Mapping[str, tuple[int, ...]] = {
            **{name: self._conversation.head(name) for name in parts.parts},
            NO_DOCUMENT: self._conversation.head(None),
        }
        self.texts = {name: (text,) for name, text in parts.texts.items()}
        self.end_ids = frozenset({tokenizer.eos_token_id})
        self._asked = self._read_asked()
        self._getting_ready = asyncio.Lock()
        self._training: dict[str, list[StudyQuestion]] = {}
        self._held_out: list[StudyQuestion] = []
        self._exams: list[HeldOutQuestion] = []
        self._hashes = {name: hash_of(text) for name, text in parts.texts.items()}
        note_documents(parts, directory)

    # -- questions ------------------------------------------------------------------------------

    async def _ready(self, generate: TimedGenerate) -> None:
        """Read or write the self-study questions, once."""
        async with self._getting_ready:
            if self._training:
                return
            if self._study.rows is not None:
                rows = of_parts(read_rows(Path(self._study.rows)), self._parts, self._study.rows)
            else:
                rows = await self._write(generate)
            found = (studied_of(r, self._spec, self._conversation) for r in rows if r.kept)
            training, held_out = split(filter(None, found), self._spec.data.held_out)
            lacking = [name for name in self._parts.parts if not training.get(name)]
            if lacking or not held_out:
                raise DataError(
                    f"self-study has no question to train on about {lacking or 'any document'}: "
                    "raise self_study.questions, lower data.held_out, set self_study.plain: true, "
                    "or raise train.row_tokens, which holds a question and its answer"
                )
            if self._study.scores == "stored":
                require_scores([s for pool in training.values() for s in pool], self._study.rows)
            self._require_clean(training, held_out)
            self._held_out = held_out[: self._spec.evaluate.questions]
            self._training = training

    def _require_clean(
        self, training: Mapping[str, Sequence[StudyQuestion]], held_out: Sequence[StudyQuestion]
    ) -> None:
        """Raise DataError, as `clean` does, before anything is trained."""
        evaluate = self._spec.evaluate
        trained = [
            LocatedText(s.document, s.text, f"self-study: {s.key}")
            for pool in training.values()
            for s in pool
        ]
        asked = [
            LocatedText(
                q.document, q.choice.text if q.choice else q.text, f"data.questions: {q.id}"
            )
            for q in self._asked
        ] or [LocatedText(s.document, s.text, f"held out: {s.key}") for s in held_out]
        clean(
            overlaps(trained, asked, evaluate.alike),
            evaluate.contamination or ("fail" if self._asked else "warn"),
            self._directory.contamination,
        )

    async def _write(self, generate: TimedGenerate) -> list[StudyRow]:
        async def sampled(requests: Sequence[GenerateRequest]) -> Sequence[Completion]:
            completions, _ = await generate(requests)
            return completions

        sampler = TokenSampler(sampled, self._conversation, None, BARE)
        plan = SynthesisPlan(self._study, self._model, self._spec.train.seed, answers=False)
        return await write_study(
            self._directory.selfstudy, list(self._parts.parts.values()), plan, sampler
        )

    def _prompt_ids(self, document: str | None, text: str) -> tuple[int, ...]:
        return self._conversation.opening(document, (AgentMessage("user", text),))

    def _prompts(self, arm: str, step: int) -> list[tuple[StudyQuestion, StudyPrompt]]:
        """Return a step's prompts: documents take turns, their questions are reshuffled each
        round."""
        rollout, seed = self._spec.rollout, self._spec.train.seed
        names = sorted(self._training)
        found = []
        for i in range(rollout.prompts):
            number, of = divmod(step * rollout.prompts + i, len(names))
            pool = self._training[names[of]]
            lap, place = divmod(number, len(pool))
            order = list(range(len(pool)))
            random.Random(f"questions/{seed}/{names[of]}/{lap}").shuffle(order)
            studied = pool[order[place]]
            name = f"{arm}/{step + 1}/{i}"
            request = GenerateRequest(
                id=name,
                prompt_ids=studied.prompt_ids,
                prefix=PrefixRef(f"document/{studied.document}", 0),
                sampling=Sampling(
                    rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_tokens
                ),
                seed=stream_seed(f"sample/{seed}/{name}"),
            )
            found.append((studied, StudyPrompt(studied.document, studied.kind, request)))
        return found

    # -- rollouts -------------------------------------------------------------------------------

    async def sample(
        self, step: int, version: int, generate: TimedGenerate, ended: ScoreGroup = unheard
    ) -> Rollout:
        await self._ready(generate)
        begun = time.perf_counter()
        train, asked = self._spec.train, [p for _, p in self._prompts("on_policy", step)]
        names = sorted(self._parts.parts)
        prompts = in_company(asked, version, names, train.compose, train.seed)
        requests = [p.request for p in prompts]
        completions, compute = await generate(requests, handed_over(prompts, ended))
        seconds = time.perf_counter() - begun
        return as_rollout(step, prompts, completions, seconds, compute, False)

    async def offline(self, first: int, generate: TimedGenerate) -> list[Rollout]:
        """Return one step of answers that model B wrote in the rows; a question without one is
        answered by the model with the whole document."""
        await self._ready(generate)
        begun = time.perf_counter()
        prompts = self._prompts("offline", first)
        unsaid = [p.request for s, p in prompts if not s.answer_ids]
        made, compute = await generate(unsaid) if unsaid else ([], 0.0)
        fresh = {c.request_id: c for c in made}
        completions = [fresh.get(p.request.id) or said(s, p) for s, p in prompts]
        asked = [p for _, p in prompts]
        seconds = time.perf_counter() - begun
        return [as_rollout(first, asked, completions, seconds, compute, True)]

    async def lesson(self, rollout: Rollout, version: int) -> TrainBatch:
        stored: tuple[PrecomputedScores, ...] = ()
        if self._study.scores == "stored" and is_offline(rollout):
            asked = enumerate(self._prompts("offline", rollout.step))
            stored = tuple(
                PrecomputedScores(i, s.teacher_ids, s.teacher_logprobs) for i, (s, _) in asked
            )
        return TrainBatch(doc=tuple(rollout.samples), doc_stored=stored)

    # -- measures -------------------------------------------------------------------------------

    async def measure(
        self, arm: str, prefix: str, version: int, *, most: int | None, sampled: bool,
        generate: TimedGenerate, keep: KeepAnswers | None = None, route: Route = own_cartridge,
    ) -> MeasuredAccuracy:  # fmt: skip
        """Return the agreement with the teacher on held-out questions; where the user gave
        questions, their answers decide the accuracy."""
        await self._ready(generate)
        await self._examine(generate)
        bare = prefix == NO_DOCUMENT
        requests = [
            self._reading(e, f"evaluate/{arm}", prefix, version, route) for e in self._exams[:most]
        ]
        completions, _ = await generate(requests)
        measured = agreement(self._exams[:most], completions)
        if keep is not None:
            both = zip(self._exams[:most], completions, strict=True)
            keep([teachers_answer(e, c, self._hashes, self._decode) for e, c in both])
        if not self._asked:
            return measured
        asked = self._asked[: most or self._spec.evaluate.questions]
        sampling = Sampling(temperature=0.0, max_tokens=self._spec.evaluate.max_tokens)
        requests = [
            GenerateRequest(
                f"evaluate/{arm}/asked/{q.id}",
                self._prompt_ids(None if bare else q.document, q.text),
                BARE if bare else PrefixRef(f"{prefix}/{route(q.document, q.text)}", version),
                sampling,
                stream_seed(f"asked/{q.id}"),
            )
            for q in asked
        ]
        answers, _ = await generate(requests)
        said = [self._decode(c.token_ids) for c in answers]
        if keep is not None:
            ids = [self._conversation.saying(q.wording) if q.wording else () for q in asked]
            readings = [reading(r, own) for r, own in zip(requests, ids, strict=True) if own]
            read, _ = await generate(readings) if readings else ([], 0.0)
            of_reading = iter(read)
            nll = [mean_nll(next(of_reading), len(own)) if own else None for own in ids]
            rows = zip(asked, answers, said, nll, strict=True)
            keep([users_answer(q, c, text, lost, self._hashes) for q, c, text, lost in rows])
        return {**answered(asked, said), "agreement": measured["agreement"]}

    async def _examine(self, generate: TimedGenerate) -> None:
        """Sample the teacher's answers to the held-out questions, once."""
        async with self._getting_ready:
            if self._exams:
                return
            # Untruncated and at temperature 1: only then is the estimate one of KL(T || S).
            sampling = Sampling(max_tokens=self._spec.evaluate.max_tokens)
            seed = self._spec.train.seed
            answers, _ = await generate(
                [
                    GenerateRequest(
                        f"teacher/{s.key}", s.prompt_ids, PrefixRef(f"document/{s.document}", 0),
                        sampling, stream_seed(f"teacher/{seed}/{s.key}"),
                    )
                    for s in self._held_out
                ]
            )  # fmt: skip
            exams = [
                HeldOutQuestion(s, self._prompt_ids(None, s.text), c.token_ids, (), ())
                for s, c in zip(self._held_out, answers, strict=True)
            ]
            read, _ = await generate(
                [self._reading(e, "teacher/read", "document", 0) for e in exams]
            )
            self._exams = [
                HeldOutQuestion(
                    e.studied, e.bare_ids, e.answer_ids,
                    c.prompt_logprobs[-len(e.answer_ids) :],
                    c.prompt_likeliest[-len(e.answer_ids) :],
                )
                for e, c in zip(exams, read, strict=True)
            ]  # fmt: skip

    def _reading(
        self, exam: HeldOutQuestion, name: str, prefix: str, version: int,
        route: Route = own_cartridge,
    ) -> GenerateRequest:  # fmt: skip
        """Return a request that reads the teacher's answer, for its log-probabilities."""
        bare = prefix == NO_DOCUMENT
        ids = exam.bare_ids if bare else exam.studied.prompt_ids
        studied = exam.studied
        over = route(studied.document, studied.text)
        ref = BARE if bare else PrefixRef(f"{prefix}/{over}", version)
        return GenerateRequest(
            f"{name}/{exam.studied.key}", (*ids, *exam.answer_ids), ref,
            Sampling(temperature=0.0, max_tokens=1), 0, prompt_logprobs=True,
        )  # fmt: skip

    def _read_asked(self) -> list[UserQuestion]:
        path = self._spec.data.questions
        if path is None:
            return []
        found = read_questions(path, self._parts.texts, self._spec.data.instruction)
        by_document = [[q for q in found if q.document == name] for name in self._parts.parts]
        return in_turns(by_document)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._conversation.decode(ids).strip()

    # -- records --------------------------------------------------------------------------------

    def record(self, rollout: Rollout, arm: str, step: int, directory: RunDirectory) -> None:
        directory.append_rollouts(as_rows(rollout, arm, step, self._decode))


def studied_of(row: StudyRow, spec: LearnSpec, conversation: ChatRenderer) -> StudyQuestion | None:
    """Return the question of a row; None when a trainer row cannot hold it with its answer."""
    ids = conversation.opening(row.document, (AgentMessage("user", row.question),))
    if len(ids) + spec.rollout.max_tokens > spec.train.row_tokens:
        return None
    room = spec.train.row_tokens - len(ids)
    # Ids of another model's tokenizer mean nothing here: its answer text is tokenized again.
    own = row.model == model_name(spec.model.path) and row.answer_ids
    answer = row.answer_ids if own else ()
    if row.answer and not own:
        answer = conversation.saying(row.answer)
    kept = min(len(answer), room) if own and len(row.teacher_ids) == len(answer) else 0
    known = all(id >= 0 for at in row.teacher_ids[:kept] for id in at)
    return StudyQuestion(
        row.key, row.document, row.kind, row.question, ids, answer[:room],
        row.teacher_ids[:kept] if known else (), row.teacher_logprobs[:kept] if known else (),
    )  # fmt: skip


def require_scores(studied: Sequence[StudyQuestion], where: str | None) -> None:
    """Raise DataError unless every answer has the same number of teacher tokens at every place."""
    lacking = [s.key for s in studied if not s.teacher_ids]
    if lacking:
        raise DataError(
            f"{where}: {len(lacking)} of {len(studied)} rows to train on have no answer with "
            f"log-probabilities of this model's tokens, the first is {lacking[0]}; write them with "
            "this model and self_study.top_k > 0, or set self_study.scores: read"
        )
    counts = sorted({len(at) for s in studied for at in s.teacher_ids})
    if len(counts) > 1:
        raise DataError(
            f"{where}: rows keep {counts} log-probabilities a token; keep one file for each "
            "self_study.top_k, or set self_study.scores: read"
        )


def note_documents(parts: Corpus, directory: RunDirectory) -> None:
    """Write the run's list of documents. Raises CheckpointError when it differs on resume."""
    told = parts.as_dict()
    if directory.documents.exists():
        before = json.loads(directory.documents.read_bytes())
        if before["documents"] != told["documents"]:
            raise CheckpointError(
                f"the documents changed since the run began ({directory.documents}); bring them "
                "back, or start anew without --resume"
            )
        return
    write_atomically(directory.documents, json.dumps(told, indent=2, ensure_ascii=False) + "\n")


def of_parts(rows: Sequence[StudyRow], parts: Corpus, where: str) -> list[StudyRow]:
    """Return the rows. Raises DataError when one is about a text that is not in `parts`."""
    for row in rows:
        part = parts.parts.get(row.document)
        if part is None or part.document.sha256 != row.sha256:
            raise DataError(
                f"{where}: {row.key} is about {row.document} of hash {row.sha256[:12]}, which is "
                "none of the run's documents; write the rows anew with `forge selfstudy`"
            )
    return list(rows)


def said(studied: StudyQuestion, prompt: StudyPrompt) -> Completion:
    """Return B's written answer as a Completion, with zeros for its unknown log-probabilities."""
    ids = studied.answer_ids
    return Completion(prompt.request.id, ids, (0.0,) * len(ids), (0,) * len(ids), "stop")
