"""Configure training by recursive self-aggregation: a whole run is one rollout.

    a step    `examples` problems x `rollouts_per_example` runs x T populations of M * N candidates
    reward    final_reward_metric of the last population
              + greedy_reward_weight * mean score of all T * M * N candidates

Every candidate is a training sample of its own. With `advantage: rollout` each candidate has the
reward of its run, compared with the other runs of the problem. With `population` it has its own
score, compared with those of its population.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from cartridge_forge.plugins.documents.spec.rows import ROW_SOURCES
from cartridge_forge.plugins.environments.spec import OF_DOCUMENTS, ProblemsSpec
from cartridge_forge.plugins.episodes.spec.learn import EpisodesLearn
from cartridge_forge.plugins.strategies.spec import shape_fault
from cartridge_forge.protocols.spec.base import Rule, SpecSection
from cartridge_forge.protocols.spec.learn import RoleFacts


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


class RsaLearn(EpisodesLearn):
    """Add recursive self-aggregation to a learning config."""

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **EpisodesLearn.choices,
        "recipe": ("rsa", *EpisodesLearn.choices["recipe"]),
    }

    rsa: RsaSpec | None = Field(
        default=None, description="runs of recursive self-aggregation; null: single answers"
    )

    @property
    def recipe(self) -> str:
        return super().recipe if self.rsa is None else "rsa"

    @property
    def needed_roles(self) -> frozenset[str]:
        return super().needed_roles | ({"rsa_aggregator"} if self.rsa is not None else set())

    @property
    def rollouts_together(self) -> int:
        if self.rsa is None:
            return super().rollouts_together
        return self.rsa.examples * self.rsa.rollouts_per_example

    @property
    def samples_answers(self) -> bool:
        return self.rsa is not None or super().samples_answers

    def role_arguments(self, name: str, run: RoleFacts) -> tuple[Any, ...]:
        return (self.rsa,) if name == "rsa_aggregator" else super().role_arguments(name, run)

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        if self.rsa is not None:
            yield from self._of_rsa(self.rsa)

    def _of_rsa(self, rsa: RsaSpec) -> Iterator[Rule]:
        """Yield what rsa needs of its own numbers and of other sections."""
        fault = shape_fault(rsa.M, rsa.N, rsa.K, rsa.T)
        if fault is not None:
            name, rule, remedy = fault
            yield True, f"rsa.{name} {rule}", remedy
        yield (
            self.episodes is not None,
            "episodes must be null with rsa, whose runs are the episodes",
            "remove one of the two sections",
        )
        objective = self.objective
        yield (
            not objective.w_rl or objective.alpha > 0 or objective.beta > 0,
            "objective.w_rl must be > 0 with rsa, and objective.alpha and beta 0: its runs have "
            "rewards, but no hints "
            "and no teachers",
            "set w_rl to 1 and the others to 0",
        )
        of_documents = rsa.problems.kind in OF_DOCUMENTS
        yield (
            of_documents == (self.data.source == "primer"),
            "data.source must be primer with rsa.problems that are about no document, and only "
            "then",
            "set data.source: primer and data.patients: 1, or rsa.problems.kind: clinic",
        )
        yield (
            not of_documents and self.data.patients != 1,
            "data.patients must be 1 with data.source primer, which is one page",
            "set it to 1",
        )
        yield (
            not of_documents and rsa.problems.most <= self.evaluate.questions,
            f"rsa.problems.most must be > evaluate.questions ({self.evaluate.questions}), which "
            "are held out of them",
            "raise it, or ask fewer",
        )
        longest = (rsa.K + 1) * self.rollout.max_tokens
        yield (
            rsa.T > 1 and longest >= self.train.row_tokens,
            f"train.row_tokens must be > {longest}: a sequence holds an aggregation's {rsa.K} "
            "candidates and its response, each of up to rollout.max_tokens, and the problem",
            "raise it, or lower rsa.K or rollout.max_tokens",
        )
        yield (
            self.evaluate.sampled,
            "evaluate.sampled must be false with rsa, whose candidates are sampled in any case",
            "remove it",
        )
        yield (
            "offline" in self.evaluate.arms,
            "evaluate.arms must not hold offline with rsa, which no teacher writes",
            "remove offline",
        )
        yield (
            self.data.source in ROW_SOURCES,
            "rsa must be left out with data.source jsonl, parquet, hub or python",
            "use the section episodes",
        )
        yield (
            self.self_study is not None,
            "rsa must be left out with self_study",
            "remove it",
        )
        yield (
            self.train.warm_start is not None,
            "train.warm_start must be left out with rsa, which no teacher writes",
            "remove train.warm_start",
        )
