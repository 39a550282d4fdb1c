"""Add documents, their questions and self-study to a learning config, `configs/*.yaml`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import Field

from cartridge_forge.plugins.documents.spec.data import DataSpec
from cartridge_forge.plugins.documents.spec.documents import DocumentsSpec, SelfStudySpec
from cartridge_forge.plugins.documents.spec.rows import FUNCTION, ROW_SOURCES
from cartridge_forge.protocols.spec.base import Rule
from cartridge_forge.protocols.spec.learn import LearnSpec


class DocumentsLearn(LearnSpec):
    """Add where documents and questions come from, and self-study about documents."""

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
        yield (
            self.rollout.repair is not None and not templates,
            "rollout.repair must be null but for patients without self_study or rsa",
            "remove it",
        )
        yield from self._of_rows()
        yield from self._of_documents()
        unnamed = self.learns_from_rewards
        yield (
            self.cartridge.per != "document" and unnamed,
            "cartridge.per must be document with episodes or rsa, whose prompts do not say which "
            "document they are about",
            "remove it",
        )
        is_single = self.data.patients < 2 or self.cartridge.per == "corpus" or unnamed
        yield (
            self.train.compose > 0 and is_single,
            "train.compose must be 0 with a single cartridge, episodes or rsa",
            "remove it, or train two cartridges or more without them",
        )
        yield (
            "routed" in self.evaluate.arms and unnamed,
            "evaluate.arms must not hold routed with episodes or rsa, whose questions are not "
            "known before they are asked",
            "remove routed",
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
        for name, owner in (
            ("split", "hub"), ("subset", "hub"), ("revision", "hub"), ("endpoint", "hub"),
            ("arguments", "python"),
        ):  # fmt: skip
            yield (
                bool(getattr(rows, name)) and data.source != owner,
                f"data.rows.{name} must be left out but with data.source {owner}",
                "remove it",
            )
        is_set = rows.columns or rows.documents or rows.held_out
        yield (
            bool(is_set) and not of_rows,
            "data.rows must be left out but with data.source jsonl, parquet, hub or python",
            "remove it",
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
        yield (
            self.data.questions is not None and source != "documents",
            "data.questions must be left out but with data.source documents",
            "remove it",
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
