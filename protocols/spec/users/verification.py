"""Configure what of a step's text the student and the document's teacher write together."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from cartridge_forge.protocols.spec.base import SpecSection, broken

LONGEST_BLOCK = 16


class VerifySpec(SpecSection):
    """Configure verified rollouts: the student proposes a block of tokens, the document's teacher
    reads it in one pass, replaces the first token that it refuses and drops the rest of the block.
    """

    block: Literal["auto"] | int = Field(
        default="auto",
        description="tokens that the student proposes at a time, at most 16; auto: by the share "
        "that the teacher accepts and the cost of its pass",
    )
    rule: Literal["threshold", "exact"] = Field(
        default="threshold",
        description="which tokens the teacher accepts: those of at least the probability `below`, "
        "or by exact speculative sampling, whose text is distributed as the teacher's own",
    )
    below: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="with rule threshold, a token is refused that the teacher gives less than this "
        "probability, at temperature 1",
    )

    @field_validator("block", mode="before")
    @classmethod
    def _count_or_auto(cls, value: Any) -> Any:
        count = isinstance(value, int) and not isinstance(value, bool)
        if value != "auto" and not (count and 1 <= value <= LONGEST_BLOCK):
            raise broken(
                f"must be auto or a whole number from 1 to {LONGEST_BLOCK}", "16 suits most runs"
            )
        return value


class MixSpec(SpecSection):
    """Configure the shares of each step's samples, by what writes them; their sum is 1. Which
    samples are of which kind depends on the seed and the step alone."""

    verified: float = Field(
        default=0.0, ge=0, le=1, description="the student, verified by the teacher (rollout.verify)"
    )
    plain: float = Field(default=0.0, ge=0, le=1, description="the student alone")
    teacher: float = Field(
        default=0.0, ge=0, le=1, description="the teacher, with the document in context"
    )

    @field_validator("teacher")
    @classmethod
    def _sums_to_one(cls, value: float, info: ValidationInfo) -> float:
        total = value + info.data.get("verified", 0.0) + info.data.get("plain", 0.0)
        if not math.isclose(total, 1.0, abs_tol=1e-6):
            raise broken(
                f"must come to 1 together with train.mix.verified and train.mix.plain ({total:g})",
                "correct one of the three",
            )
        return value
