"""Configure the documents that cartridges learn, and their questions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from cartridge_forge.plugins.documents.spec.rows import ROW_SOURCES, RowSource, RowsSpec
from cartridge_forge.protocols.spec.base import (
    Absolute,
    LocalPath,
    PathRule,
    ReadWith,
    SpecSection,
    broken,
)
from cartridge_forge.protocols.spec.sections import OF_PROMPTS


def _join_paths(value: Any) -> Any:
    listed = isinstance(value, list) and all(isinstance(v, str) and v for v in value)
    return os.pathsep.join(value) if listed else value


JoinedPaths = BeforeValidator(_join_paths)


def _local_data(text: str, sections: Sequence[Any], absolute: Absolute) -> str:
    """Return each of the paths absolute; a URL, a dataset of the hub and a function as it is."""
    source = sections[-1].source
    if text.startswith(("http://", "https://")) or source in ("hub", "python"):
        return text
    several = source in ("documents", "handbook", *ROW_SOURCES)
    return os.pathsep.join(map(absolute, text.split(os.pathsep) if several else [text]))


OF_CLINIC = ReadWith("source", ("clinic",))
OF_PATH = ReadWith("source", ("clinic", "longhealth", "documents", "handbook", *ROW_SOURCES))
GENERATED = ReadWith("path", (None,))
QUESTIONED = ("clinic", "longhealth", "documents")  # whose questions have options


class DataSpec(SpecSection):
    """Configure the patients, their documents and their questions."""

    source: (
        Literal["clinic", "longhealth", "desk", "environment", "primer", "documents", "handbook"]
        | RowSource
    ) = Field(
        default="clinic",
        description="clinic: generated here; longhealth: LongHealth's JSON from data.path; desk: "
        "handbooks of generated clinic desks, for episodes with tools; environment: the documents "
        "of your own environments, for their episodes; primer: a page on solving "
        "problems, for those of rsa that are about no document; documents: the files of data.path; "
        "handbook: rules in a text, with tasks that they govern, from data.path or of generated "
        "desks; jsonl, parquet, hub, python: your own rows of prompts",
    )
    path: Annotated[str | None, JoinedPaths, PathRule(_local_data), OF_PATH] = Field(
        default=None,
        min_length=1,
        description="LongHealth JSON, a path or an http(s) URL, read in place of the clinic; or "
        "documents: a folder, a file, a pattern, or a list of them; handbooks: a file or folder of "
        "each; of rows: a file or several, a "
        "dataset of the hub (OWNER/NAME), or a function (package.module:name)",
    )
    questions: Annotated[LocalPath | None, ReadWith("source", ("documents",))] = Field(
        default=None,
        min_length=1,
        description="questions about documents, as SQuAD or LongHealth has them; null: self-study "
        "questions that are held out",
    )
    seed: Annotated[int, ReadWith("source", ("clinic", "desk", "handbook", *ROW_SOURCES))] = Field(
        default=0, ge=0, description="seed of what is generated, and of the split of rows"
    )
    patients: int = Field(
        default=1,
        ge=1,
        description="patients or desks to generate, the first patients of the file, the most "
        "documents, or the number of your environments or handbooks",
    )
    facts: Annotated[int | None, ReadWith("source", ("clinic", "desk", "handbook")), GENERATED] = (
        Field(
            default=None,
            ge=1,
            validate_default=True,
            description="facts of a generated patient, or fields in a desk's handbook",
        )
    )
    notes: Annotated[int | None, OF_CLINIC, GENERATED] = Field(
        default=None, ge=1, validate_default=True, description="notes of a generated patient"
    )
    questions_per_fact: Annotated[int, OF_CLINIC, GENERATED] = Field(
        default=1,
        ge=1,
        description="questions about each fact of a generated patient, options differ",
    )
    own_fields: Annotated[bool, OF_CLINIC, GENERATED] = Field(
        default=False,
        description="whether no two generated patients have a fact about the same field, so that a "
        "question is about one of them alone",
    )
    held_out: Annotated[float, ReadWith("source", (*QUESTIONED, *ROW_SOURCES))] = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of the questions or rows kept for evaluation, in (0, 1]",
    )
    rows: Annotated[RowsSpec, ReadWith("source", ROW_SOURCES)] = Field(
        default=RowsSpec(), description="how rows are read: jsonl, parquet, hub, python"
    )
    instruction: Annotated[str, ReadWith("source", QUESTIONED)] = Field(
        default="", description="text appended to every option question"
    )
    name_document: Annotated[Literal["auto", "always", "never"], OF_PROMPTS] = Field(
        default="auto",
        description="whether prompts begin with the name of the patient or document that they are "
        "about; auto: where one cartridge learns from several",
    )
    document_tokens: int | None = Field(
        default=None, ge=1, description="tokens of a document: the dry run's estimate only"
    )
    prompt_tokens: int | None = Field(
        default=None, ge=1, description="tokens of a prompt: the dry run's estimate only"
    )

    @field_validator("facts", "notes")
    @classmethod
    def _clinic_only(cls, value: int | None, info: ValidationInfo) -> int | None:
        source, path = info.data.get("source"), info.data.get("path")
        fields = source in ("desk", "handbook") and info.field_name == "facts"
        if (fields or source == "clinic") and path is None and value is None:
            rule = f"must be given with data.source {source}"
            raise broken(rule, "set it to a count of 1 or more")
        facts = info.data.get("facts")
        if info.field_name == "notes" and value is not None and facts is not None and value > facts:
            raise broken(f"must be <= facts ({facts})", "a note needs a fact: lower it")
        return value
