"""Configure training by recursive self-aggregation: a whole run is one rollout.

    a step    `examples` problems x `rollouts_per_example` runs x T populations of M * N candidates
    reward    final_reward_metric of the last population
              + greedy_reward_weight * mean score of all T * M * N candidates

Every candidate is a training sample of its own. With `advantage: rollout` each candidate has the
reward of its run, compared with the other runs of the problem. With `population` it has its own
score, compared with those of its population.
"""

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


class RsaSpec(SpecSection):
    """Configure recursive self-aggregation as rollouts to train on."""

    M: int = Field(default=1, ge=1, description="islands, a power of two")
    N: int = Field(default=4, ge=1, description="candidates of an island")
    K: int = Field(default=2, ge=1, description="candidates that are aggregated into one")
    T: int = Field(default=3, ge=1, description="populations, the first included")
    task: Literal["general", "math", "supergpqa", "rg", "clinic"] = Field(
        default="clinic", description="how answers are asked for, and where they are looked for"
    )
    final_reward_metric: Literal["mean_accuracy", "majority_vote", "pass_at_n"] = Field(
        default="mean_accuracy", description="of the last population: what a run is worth"
    )
    greedy_reward_weight: float = Field(
        default=0.0, ge=0, description="weight of the mean score of all candidates"
    )
    examples: int = Field(default=2, ge=1, description="problems of a step")
    rollouts_per_example: int = Field(
        default=4, ge=2, description="runs of one problem, whose rewards are compared"
    )
    advantage: Literal["rollout", "population"] = Field(
        default="rollout",
        description="rollout: a candidate has its run's reward, against the problem's other runs; "
        "population: its own score, against its population's",
    )
    problems: ProblemsSpec = Field(default=ProblemsSpec(), description="what runs are about")

    @property
    def candidates(self) -> int:
        """Return the number of candidates in all populations of one run."""
        return self.T * self.M * self.N


def shape_fault(M: int, N: int, K: int, T: int) -> tuple[str, str, str] | None:
    """Return the first of the four numbers that does not fit those before it, as (name, broken
    rule, remedy), or None where all fit. `strategies.rsa.islands` describes the numbers."""
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
