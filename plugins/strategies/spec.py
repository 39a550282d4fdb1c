"""Configure what judges the steps of a strategy, `process_reward`: a model or a judge."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator

from cartridge_forge.plugins.replay.spec import ReplayTeacherSpec
from cartridge_forge.protocols.spec.base import LocalPath, SpecSection, broken


class RewardModelSpec(SpecSection):
    """Configure a process reward model, which runs in a process of its own, on the CPU."""

    path: LocalPath = Field(
        min_length=1,
        description="directory of a token or sequence classifier of transformers, relative to the "
        "file that names it",
    )
    separator: str = Field(
        default="\n\n", min_length=1, description="text behind the question and behind every step"
    )
    positive: int = Field(default=1, ge=0, description="label of a good step; a model with one: 0")
    threads: int = Field(default=1, ge=1, description="threads of its process")
    timeout_s: float = Field(default=60.0, gt=0, description="seconds to score one call's steps")


class RewardJudgeSpec(SpecSection):
    """Configure an external model that judges steps, with its own ledger and spending cap."""

    teacher: ReplayTeacherSpec = Field(description="who judges, and what its tokens cost")
    cap: float = Field(
        gt=0, description="most dollars that a server, or a run's frontier, pays it in all"
    )
    ledger: LocalPath = Field(
        default="judge_calls.jsonl",
        min_length=1,
        description="file of calls, answers and costs, relative to the file that names it",
    )
    deadline_s: float = Field(
        default=60.0, gt=0, description="seconds to score one call's steps, retries included"
    )


class ProcessRewardSpec(SpecSection):
    """Configure what the scorer process_reward asks: a model or a judge."""

    model: RewardModelSpec | None = Field(default=None, description="a process reward model")
    judge: RewardJudgeSpec | None = Field(default=None, description="a model over an API")

    @field_validator("judge")
    @classmethod
    def _is_one(cls, value: RewardJudgeSpec | None, info: ValidationInfo) -> RewardJudgeSpec | None:
        if "model" in info.data and (value is None) == (info.data["model"] is None):
            raise broken("must have a model or a judge, and not both", "keep one of them")
        return value
