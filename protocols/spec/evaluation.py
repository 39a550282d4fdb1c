"""Configure `forge eval`: the typed `configs/eval.yaml`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from protocols.spec.base import SpecSection


class EvalSpec(SpecSection):
    """Configure the questions, passages and probes that every arm answers."""

    questions: int = Field(default=200, ge=1, description="most questions about the documents")
    max_tokens: int | None = Field(
        default=None, ge=1, description="most tokens of an answer; null: the run's evaluate section"
    )
    passages: int = Field(
        default=4, ge=0, description="passages of each document that are read word by word"
    )
    passage_tokens: int = Field(default=48, ge=8, description="tokens of a passage")
    probes: int = Field(
        default=24, ge=0, description="questions that no document answers, to see what is forgotten"
    )
    resamples: int = Field(default=10_000, ge=100, description="bootstrap samples of the questions")
    seed: int = Field(default=0, ge=0, description="seed of every draw")
    contamination: Literal["fail", "warn"] | None = Field(
        default=None,
        description="what training prompts that double the questions do; null: as the run's",
    )
