"""Measure what a run's cartridges know of the documents that it studies.

    held-out questions   the teacher's own sampled answers, read by each arm
    questions asked      the user's, or LongHealth's held-out ones: answered by each arm

For an answer y sampled by the teacher T, the sum of log T(y_t) - log S(y_t) is an unbiased estimate
of KL(T || S). It needs only the arm S's log-probabilities of y, and is reported per token, with the
share of tokens at which both have the same likeliest token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.chat.rollouts import contexts_of, mean_nll
from cartridge_forge.plugins.documents.corpus import Corpus
from cartridge_forge.plugins.documents.spec.learn import DocumentsLearn
from cartridge_forge.plugins.documents.study.agreement import (
    HeldOutQuestion,
    StudyQuestion,
    agreement,
    answered,
    teachers_answer,
    users_answer,
)
from cartridge_forge.plugins.documents.study.passages import (
    RETRIEVED,
    RETRIEVED_CARTRIDGE,
    PassagePrompts,
)
from cartridge_forge.plugins.documents.study.prompts import answered_over, reading, titled_messages
from cartridge_forge.plugins.documents.study.question_files import UserQuestion
from cartridge_forge.protocols.records.answers import Answer, KeepAnswers
from cartridge_forge.protocols.records.run_files import MeasuredAccuracy
from cartridge_forge.protocols.step import (
    BARE,
    NO_DOCUMENT,
    GenerateRequest,
    PrefixRef,
    Sampling,
    stream_seed,
)
from cartridge_forge.training.recipe import Route, own_cartridge
from cartridge_forge.training.records import GenerateCall, context_ref, with_title


class StudyExam:
    """Measure arms on the `held_out` self-study questions, and on the questions `asked`.
    `questions` are the held-out ones with the teacher's answers, once these are sampled."""

    def __init__(
        self,
        spec: DocumentsLearn,
        parts: Corpus,
        conversation: ChatRenderer,
        titles: Mapping[str, str],
        asked: Sequence[UserQuestion],
        tokenizer: Any,
    ) -> None:
        self._spec, self._parts, self._layout = spec, parts, parts.layout
        self._conversation, self._titles = conversation, titles
        self._passages = PassagePrompts(
            parts.layout, parts.texts, tokenizer, conversation, spec.cartridge.tokens,
            spec.evaluate.arms, spec.evaluate.retriever,
        )  # fmt: skip
        self.asked, self.held_out = list(asked), list[StudyQuestion]()
        self.questions: list[HeldOutQuestion] = []
        self._sampling = asyncio.Lock()

    async def measure(
        self, arm: str, prefix: str, version: int, *, most: int | None, generate: GenerateCall,
        keep: KeepAnswers | None = None, route: Route = own_cartridge,
    ) -> MeasuredAccuracy:  # fmt: skip
        """Return the agreement with the teacher on held-out questions; where questions are asked,
        their answers decide the accuracy."""
        await self._sample_answers(generate)
        exams = self.questions[:most]
        measured: MeasuredAccuracy | None = None
        if exams:
            requests = [self._reading(e, arm, prefix, version, route) for e in exams]
            completions = await generate(requests)
            measured = agreement(exams, completions)
            if keep is not None:
                hashes = self._hashes(e.studied.document for e in exams)
                both = zip(exams, completions, strict=True)
                told = [teachers_answer(e, c, hashes, self.decode) for e, c in both]
                keep(answered_over([self._kept(answer) for answer in told], requests))
            if not self.asked:
                return measured
        asked = self.asked[: most or self._spec.evaluate.questions]
        sampling = Sampling(temperature=0.0, max_tokens=self._spec.evaluate.max_tokens)
        requests = [
            GenerateRequest(
                f"evaluate/{arm}/asked/{q.id}",
                *self._prompt(arm, q.document, q.messages, prefix, version, route),
                sampling,
                stream_seed(f"asked/{q.id}"),
            )
            for q in asked
        ]
        answers = await generate(requests)
        said = [self.decode(c.token_ids) for c in answers]
        if keep is not None:
            ids = [self._conversation.saying(q.wording) if q.wording else () for q in asked]
            readings = [reading(r, own) for r, own in zip(requests, ids, strict=True) if own]
            read = await generate(readings) if readings else []
            of_reading = iter(read)
            nll = [mean_nll(next(of_reading), len(own)) if own else None for own in ids]
            hashes = self._hashes(q.document for q in asked)
            rows = zip(asked, answers, said, nll, strict=True)
            told = [users_answer(q, c, t, lost, hashes) for q, c, t, lost in rows]
            keep(answered_over([self._kept(answer) for answer in told], requests))
        found = answered(asked, said)
        return found if measured is None else {**found, "agreement": measured["agreement"]}

    def document(self, about: str) -> str:
        """Return the document of contexts that are read as one text."""
        return self._layout.documents[contexts_of(about)[0]]

    def prompt_ids(
        self, about: str, messages: Sequence[AgentMessage], bare: bool = False
    ) -> tuple[int, ...]:
        """Return the ids of a prompt about contexts, after any prefix or without one."""
        context = contexts_of(about)[0]
        said = titled_messages(self._titles, context, messages)
        return self._conversation.opening(None if bare else context, said)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without the spaces around it."""
        return self._conversation.decode(ids).strip()

    def _ref(
        self, about: str, messages: Sequence[AgentMessage], prefix: str, version: int, route: Route
    ) -> PrefixRef:
        """Return the prefix of an arm before a prompt about contexts; `route` reads its last turn
        as a server does, after the title."""
        if prefix == NO_DOCUMENT:
            return BARE
        if prefix == "document":
            return context_ref(contexts_of(about))
        cartridge = self._layout.cartridge_of(self.document(about))
        asked = with_title(self._titles, contexts_of(about)[0], messages[-1].content)
        return PrefixRef(f"{prefix}/{route(cartridge, asked)}", version)

    def _kept(self, answer: Answer) -> Answer:
        """Return the record of an answer to a question about contexts, by their document."""
        contexts, document = contexts_of(answer.document), self.document(answer.document)
        cartridge = self._layout.cartridge_of(document)
        return replace(answer, document=document, cartridge=cartridge, contexts=contexts)

    def _hashes(self, abouts: Iterable[str]) -> dict[str, str]:
        return {about: self._parts.hashes[contexts_of(about)[0]] for about in abouts}

    async def _sample_answers(self, generate: GenerateCall) -> None:
        """Sample the teacher's answers to the held-out questions, once."""
        async with self._sampling:
            if self.questions or not self.held_out:
                return
            # Untruncated and at temperature 1: only then is the estimate one of KL(T || S).
            sampling = Sampling(max_tokens=self._spec.evaluate.max_tokens)
            seed = self._spec.train.seed
            answers = await generate(
                [
                    GenerateRequest(
                        f"teacher/{s.key}", s.prompt_ids, context_ref((s.document,)), sampling,
                        stream_seed(f"teacher/{seed}/{s.key}"),
                    )
                    for s in self.held_out
                ]
            )  # fmt: skip
            exams = [
                HeldOutQuestion(
                    s, self.prompt_ids(s.document, s.messages, bare=True), c.token_ids, (), ()
                )
                for s, c in zip(self.held_out, answers, strict=True)
            ]
            read = await generate([self._reading(e, "document", "document", 0) for e in exams])
            self.questions = [
                HeldOutQuestion(
                    e.studied, e.bare_ids, e.answer_ids,
                    c.prompt_logprobs[-len(e.answer_ids) :],
                    c.prompt_likeliest[-len(e.answer_ids) :],
                )
                for e, c in zip(exams, read, strict=True)
            ]  # fmt: skip

    def _reading(
        self, exam: HeldOutQuestion, arm: str, prefix: str, version: int,
        route: Route = own_cartridge,
    ) -> GenerateRequest:  # fmt: skip
        """Return a request that reads the teacher's answer, for its log-probabilities."""
        studied = exam.studied
        ids, ref = self._prompt(arm, studied.document, studied.messages, prefix, version, route)
        return GenerateRequest(
            f"evaluate/{arm}/{exam.studied.key}", (*ids, *exam.answer_ids), ref,
            Sampling(temperature=0.0, max_tokens=1), 0, prompt_logprobs=True,
        )  # fmt: skip

    def _prompt(
        self, arm: str, about: str, messages: Sequence[AgentMessage], prefix: str, version: int,
        route: Route,
    ) -> tuple[tuple[int, ...], PrefixRef]:  # fmt: skip
        """Return an arm's prompt about contexts and what stands before it."""
        context = contexts_of(about)[0]
        cartridge = self._layout.cartridge_of(self.document(about))
        titled = titled_messages(self._titles, context, messages)
        if arm == RETRIEVED:
            return self._passages.as_document(cartridge, titled)
        ref = self._ref(about, messages, prefix, version, route)
        if arm == RETRIEVED_CARTRIDGE:
            return self._passages.before_question(cartridge, context, titled), ref
        return self.prompt_ids(about, messages, bare=prefix == NO_DOCUMENT), ref
