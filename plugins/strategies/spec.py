"""Configure what judges the steps of a strategy, `process_reward`: a model or a judge. Check the
numbers of recursive self-aggregation."""

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


def shape_fault(M: int, N: int, K: int, T: int) -> tuple[str, str, str] | None:
    """Return the first of the four numbers that does not fit those before it, as (name, broken
    rule, remedy), or None where all fit; see `plugins.strategies.rsa.islands`."""
    for name, value in (("M", M), ("N", N), ("K", K), ("T", T)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return name, "must be a whole number >= 1", "raise it"
    if M & (M - 1):
        below = 1 << (M.bit_length() - 1)
        rule = "must be a power of two, for islands merge in pairs"
        return "M", rule, f"use {below} or {2 * below}"
    if K > N:
        return "K", f"must be <= N ({N}), the candidates of an island", "lower K or raise N"
    stages = M.bit_length()
    if T % stages:
        below = T - T % stages
        rule = f"must be divisible by log2(M) + 1 = {stages}, for every stage of merging takes as "
        rule += f"many populations (M is {M})"
        return "T", rule, f"use {f'{below} or ' if below else ''}{below + stages}, or another M"
    return None
