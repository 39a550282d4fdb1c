"""Add documents, their questions and self-study to a learning config, `configs/*.yaml`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import ClassVar

from pydantic import Field

from cartridge_forge.plugins.documents.spec.data import DataSpec
from cartridge_forge.plugins.documents.spec.documents import DocumentsSpec, SelfStudySpec
from cartridge_forge.plugins.documents.spec.rows import FUNCTION, ROW_SOURCES
from cartridge_forge.protocols.spec.base import Rule
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.spec.sections import RETRIEVED_ARMS


class DocumentsLearn(LearnSpec):
    """Add where documents and questions come from, and self-study about documents."""

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"recipe": ("self_study", "data.source")}

    data: DataSpec = Field(description="patients, documents and questions")
    documents: DocumentsSpec = Field(
        default=DocumentsSpec(), description="how files of data.path are read"
    )
    self_study: SelfStudySpec | None = Field(
        default=None, description="questions about the user's documents; null: other data"
    )

    @property
    def recipe(self) -> str:
        is_written = self.self_study is not None or self.data.source in ROW_SOURCES
        return "documents" if is_written else "longhealth"

    @property
    def cartridges(self) -> int:
        by_document = self.cartridge.per == "document"
        return self.data.patients if by_document else super().cartridges

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        stored = self.self_study is not None and self.self_study.scores == "stored"
        yield (
            self.loss.temperature != 1.0 and stored,
            "loss.temperature must be 1 with a top-k teacher, which sends no whole distribution to "
            "divide",
            "set it to 1, or self_study.scores to read",
        )
        patients = self.data.source in ("clinic", "longhealth")
        templates = patients and self.recipe == "longhealth"
        yield (
            self.train.offline_texts is not None and not templates,
            "train.offline_texts must be null but for patients without self_study or rsa: a "
            "teacher writes other runs no text, or rows that are read again in any case",
            "remove it",
        )
        yield from self._of_verification()
        yield from self._of_student_top()
        yield from self._of_rows()
        yield from self._of_documents()
        unnamed = self.learns_from_rewards
        yield (
            self.cartridge.per != "document" and unnamed,
            "cartridge.per must be document with episodes or rsa, whose prompts do not say which "
            "document they are about",
            "remove it",
        )
        compose = self.train.compose
        yield (
            compose is not None and compose.distractors >= self.cartridges,
            f"train.compose.distractors must be less than the run's cartridges ({self.cartridges})",
            "lower it, or train more cartridges",
        )
        unknown = [a for a in self.evaluate.arms if a in ("routed", *RETRIEVED_ARMS)]
        yield (
            bool(unknown) and unnamed,
            f"evaluate.arms must not hold {' or '.join(unknown)} with episodes or rsa, whose "
            "questions are not known before they are asked",
            f"remove {' and '.join(unknown)}",
        )
        yield (
            not self.rollout.prompts and not self.learns_from_rewards,
            "rollout.prompts must be >= 1 without episodes or rsa",
            "set it to the prompts of a step",
        )

    def _of_student_top(self) -> Iterator[Rule]:
        """Yield what a teacher that tells the student's likeliest tokens needs."""
        teacher, vllm = self.teacher, self.generator.backend == "vllm"
        yield (
            teacher.student_top > 20 and vllm,
            "teacher.top_k must be at most 20 with teacher.top_k_of both and generator.backend "
            "vllm, which tells no more log-probabilities at a place",
            "lower it, or set teacher.top_k_of: teacher",
        )
        warm = None if self.train.warm_start is None else self.train.warm_start.loss
        for key, loss in (("loss", self.loss), ("train.warm_start.loss", warm)):
            yield (
                loss is not None and loss.form == "pairs" and teacher.student_top > 0,
                f"{key}.form must not be pairs with teacher.top_k_of both: pairs of tokens that "
                "the student chose are no published curve's",
                "set form: tail, or teacher.top_k_of: teacher",
            )

    def _of_verification(self) -> Iterator[Rule]:
        """Yield what verified rollouts and mixtures need of other sections."""
        rollout, mix = self.rollout, self.train.mix
        exact = rollout.verify is not None and rollout.verify.rule == "exact"
        yield (
            exact and self.generator.backend == "vllm",
            "rollout.verify.rule must be threshold with generator.backend vllm, which does not "
            "return the logits that its tokens were drawn from",
            "set rule: threshold, or generator.backend: torch",
        )
        yield (
            mix is not None and (mix.verified > 0) != (rollout.verify is not None),
            "train.mix must have a share `verified` with rollout.verify, and only then",
            "set rollout.verify, or train.mix.verified to 0",
        )
        only_verified = rollout.verify is not None and (mix is None or not mix.plain)
        yield (
            rollout.until_refused is not None and only_verified,
            "rollout.until_refused must be null where the student writes no response alone",
            "remove it, or give train.mix a share `plain`",
        )

    def _of_rows(self) -> Iterator[Rule]:
        """Yield what a dataset's rows need."""
        data, rows = self.data, self.data.rows
        of_rows = data.source in ROW_SOURCES
        yield (
            of_rows and data.path is None,
            f"data.path must be given with data.source {data.source}",
            "name a file, a dataset of the hub, or package.module:function",
        )
        for key, path in (("data.path", data.path), ("data.rows.held_out", rows.held_out)):
            yield (
                data.source == "python" and path is not None and not re.fullmatch(FUNCTION, path),
                f"{key} must be package.module:function with data.source python",
                "correct it",
            )
        yield (
            of_rows and not self.learns_from_rewards and not self.objective.w_doc,
            "objective.w_doc must be > 0 with rows and no episodes, which learn from their "
            "documents",
            "set it, or add the sections episodes and reward",
        )

    def _of_documents(self) -> Iterator[Rule]:
        """Yield what self-study needs of other sections, and a user's documents of self-study."""
        study, train, most = self.self_study, self.train, self.rollout.max_tokens
        source = self.data.source
        yield (
            study is None and source == "documents",
            "self_study must be given with data.source documents",
            "add the section self_study, or set another data.source",
        )
        if study is not None:
            yield (
                source not in ("documents", "longhealth"),
                "data.source must be documents or longhealth with self_study",
                "set one of the two, or remove the section self_study",
            )
            yield (
                self.evaluate.sampled,
                "evaluate.sampled must be left out with self_study",
                "remove it",
            )
            yield (
                study.question_tokens + most > train.row_tokens,
                f"self_study.question_tokens must be <= train.row_tokens ({train.row_tokens}) with "
                f"rollout.max_tokens ({most})",
                "a sequence holds a question and its answer: raise train.row_tokens",
            )
            yield (
                study.prompt_tokens + most > train.row_tokens,
                f"self_study.rounds must leave room for rollout.max_tokens ({most}) in "
                f"train.row_tokens ({train.row_tokens}): so many turns take up to "
                f"{study.prompt_tokens:,} tokens",
                "lower it, self_study.answer_tokens or question_tokens, or raise train.row_tokens",
            )
