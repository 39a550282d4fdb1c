"""Configure problems without an environment, and the judge of their answers: `rsa.problems`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from cartridge_forge.protocols.spec.base import SpecSection, broken

ProblemKind = Literal["clinic", "sentences", "reasoning_gym", "verifiers"]
OF_DOCUMENTS = ("clinic", "sentences")


class ProblemsSpec(SpecSection):
    """Configure the source of problems and the judge of their answers."""

    kind: ProblemKind = Field(
        default="clinic",
        description="clinic: the patients' option questions that are not held out; sentences: such "
        "questions made of the documents' own sentences; reasoning_gym: a procedural task; "
        "verifiers: a taskset",
    )
    name: str | None = Field(
        default=None,
        min_length=1,
        validate_default=True,
        description="the task of reasoning_gym, or the taskset of verifiers",
    )
    arguments: dict[str, Any] = Field(
        default={}, description="of the task's, or the taskset's, own config"
    )
    seed: int = Field(default=0, ge=0, description="seed of reasoning_gym's problems")
    folder: str | None = Field(
        default=None, min_length=1, description="where a taskset is imported from, absolute"
    )
    most: int = Field(
        default=1000,
        ge=2,
        description="problems of reasoning_gym or verifiers; the first evaluate.questions are held "
        "out",
    )
    turns: int = Field(
        default=1,
        ge=1,
        description="turns of a taskset of verifiers: each line of a candidate is one, in order; "
        "1: the whole candidate is the only turn",
    )
    timeout_s: float = Field(
        default=20.0, gt=0, description="seconds that one candidate's judgement may take"
    )

    @field_validator("name")
    @classmethod
    def _names_what_is_not_the_clinic(cls, value: str | None, info: ValidationInfo) -> str | None:
        kind = info.data.get("kind")
        if kind in OF_DOCUMENTS and value is not None:
            raise broken("belongs to the kinds reasoning_gym and verifiers", "remove it")
        if kind not in (*OF_DOCUMENTS, None) and value is None:
            raise broken(f"must be given with kind {kind}", "name its task or taskset")
        return value

    @field_validator("turns")
    @classmethod
    def _are_of_a_taskset(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("kind") not in ("verifiers", None):
            raise broken("belongs to the kind verifiers", "remove it")
        return value
