"""Add episodes with an environment, and their rewards, to a learning config, `configs/*.yaml`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from cartridge_forge.plugins.documents.spec.learn import DocumentsLearn
from cartridge_forge.plugins.documents.spec.rows import ROW_SOURCES
from cartridge_forge.plugins.environments.spec import EnvironmentSpec, RewardSpec
from cartridge_forge.plugins.episodes.spec.objective import (
    HINT_SOURCE,
    HINT_WRITER,
    EpisodesObjective,
)
from cartridge_forge.plugins.replay.spec import ReplayLearn
from cartridge_forge.protocols.spec.base import (
    AsTuple,
    ReadWith,
    Rule,
    SpecSection,
    broken,
    repeated,
)
from cartridge_forge.protocols.spec.learn import RoleFacts
from cartridge_forge.protocols.spec.mesh import HINTED_TEACHER

OF_EPISODES = ("desk", "environment", "handbook")
SCRIPTED = ("handbook", *ROW_SOURCES)  # sources whose tasks no environment plays


class EpisodesSpec(SpecSection):
    """Configure episodes of several turns with an environment's tools, sampled in groups."""

    environment: Annotated[EnvironmentSpec, ReadWith("data.source", ("desk", "environment"))] = (
        Field(default=EnvironmentSpec(), description="what answers the student's calls")
    )
    environments: Annotated[tuple[EnvironmentSpec, ...], AsTuple] = Field(
        default=(),
        description="several environments in place of `environment`, whose tasks take turns by "
        "`weight`",
    )
    tasks: int = Field(ge=1, description="tasks a step, over all documents")
    group: int = Field(
        default=8, ge=2, description="episodes of one task, whose rewards are compared"
    )
    max_turns: int = Field(default=5, ge=1, description="most turns of the student")
    cases: Annotated[int, ReadWith("data.source", ("desk",))] = Field(
        default=1,
        ge=1,
        description="cases of an episode, each a conversation; it is rewarded if all are right",
    )
    max_context: int = Field(
        ge=2, description="most tokens of an episode after the cartridge; fits train.row_tokens"
    )

    @field_validator("environments")
    @classmethod
    def _are_named_apart(
        cls, value: tuple[EnvironmentSpec, ...], info: ValidationInfo
    ) -> tuple[EnvironmentSpec, ...]:
        if value and info.data.get("environment") != EnvironmentSpec():
            raise broken("must be left out beside environment", "write all of them in the list")
        if twice := repeated([e.id for e in value]):
            raise broken("must have environments of different names", f"name one of the {twice}")
        return value

    @property
    def played(self) -> tuple[EnvironmentSpec, ...]:
        """Return the environments that the tasks are of."""
        return self.environments or (self.environment,)


class EpisodesLearn(DocumentsLearn, ReplayLearn):
    """Add episodes and their rewards to a learning config."""

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "recipe": ("episodes", *DocumentsLearn.choices["recipe"]),
        "objective.several_channels": tuple(
            f"objective.{key}" for key in ("w_doc", "w_rl", "alpha", "beta", "channels")
        ),
        "objective.reads_document": (
            "objective.w_doc", "objective.w_rl", "objective.grpo.distill", "objective.grpo.kl",
            "objective.grpo.kl_reference",
        ),
    }  # fmt: skip

    objective: EpisodesObjective = Field(
        default=EpisodesObjective(), description="the channels and their weights"
    )
    episodes: EpisodesSpec | None = Field(
        default=None, description="episodes with an environment; null: self-study prompts"
    )
    reward: Annotated[tuple[RewardSpec, ...], AsTuple] = Field(
        default=(),
        description="rewards of an episode, summed by weight; held-out episodes count as right by "
        "the first; none: the environment's own",
    )

    @field_validator("reward")
    @classmethod
    def _rewards_have_names(cls, value: tuple[RewardSpec, ...]) -> tuple[RewardSpec, ...]:
        if twice := repeated([reward.title for reward in value]):
            raise broken("must have names of their own", f"give one {twice} another name")
        if value and not any(reward.weight for reward in value):
            raise broken("must hold a weight other than 0", "set one, or nothing is learnt")
        return value

    @property
    def recipe(self) -> str:
        return super().recipe if self.episodes is None else "episodes"

    @property
    def learns_from_rewards(self) -> bool:
        return self.recipe in ("episodes", "rsa")

    @property
    def needed_roles(self) -> frozenset[str]:
        plays = self.episodes is not None and self.data.source not in SCRIPTED
        return (
            super().needed_roles
            | ({HINTED_TEACHER} if self.objective.alpha > 0 else set())
            | ({"environment"} if plays else set())
            | ({"reward"} if any(reward.of_worker for reward in self.reward) else set())
        )

    @property
    def rollouts_together(self) -> int:
        if self.episodes is None:
            return super().rollouts_together
        return self.episodes.tasks * self.episodes.group

    def role_arguments(self, name: str, run: RoleFacts) -> tuple[Any, ...]:
        if name == "reward":
            return (self.reward, run.call_timeout_s)
        if name != "environment":
            return super().role_arguments(name, run)
        assert self.episodes is not None
        # As many moves at once as training itself makes; an evaluation has more episodes.
        at_once = -(-self.rollouts_together * (self.train.staleness + 1) // run.replicas)
        return (self.episodes.played, self.episodes.max_turns, at_once)

    def rules(self) -> Iterator[Rule]:
        yield from self._of_judged_rows()
        yield from super().rules()
        objective, episodes = self.objective, self.episodes
        weighted = next((k for k in ("w_rl", "alpha", "beta") if getattr(objective, k)), "w_rl")
        yield (
            objective.of_episodes and not self.learns_from_rewards,
            f"objective.{weighted} must be 0 without episodes, which the channels but doc_kl learn "
            "from",
            "add the section episodes, or rsa",
        )
        of_rows = self.data.source in ROW_SOURCES
        yield (
            (episodes is None) == (self.data.source in OF_EPISODES) and not of_rows,
            "data.source must be desk, environment, handbook or rows (jsonl, parquet, hub, python) "
            "with episodes; the first three only then",
            "set data.source: desk, or environment for your own; or remove the section episodes",
        )
        if episodes is not None:
            yield from self._of_verified_turns()
        if episodes is not None and self.data.source == "handbook":
            yield from self._of_handbooks(episodes)
        if episodes is not None and self.data.source == "environment":
            yield from self._of_environments(episodes)
        elif episodes is not None and self.data.source != "handbook":
            yield (
                bool(episodes.environments) or episodes.environment.kind not in ("desk", "openenv"),
                "data.source must be environment with environments of your own",
                "set data.source: environment, or episodes.environment to the desk",
            )
        hint_teacher = objective.hints.hint_teacher if objective.alpha > 0 else None
        judges = [reward.teacher for reward in self.reward if reward.teacher is not None]
        yield (
            (objective.beta > 0 or hint_teacher is not None or bool(judges))
            != (self.replay is not None),
            "objective.beta must be > 0 with the section replay, and only then, unless one of its "
            f"teachers writes the hints ({HINT_WRITER}) or judges (reward.teacher)",
            "set it, or remove the section replay",
        )
        named = () if self.replay is None else tuple(t.name for t in self.replay.teachers)
        yield (
            hint_teacher is not None and hint_teacher not in named,
            f"{HINT_WRITER} must be generator or one of replay.teachers ({', '.join(named)})",
            "correct the name",
        )
        for number, reward in enumerate(self.reward):
            yield (
                reward.teacher is not None and reward.teacher not in named,
                f"reward must be judged by one of replay.teachers ({', '.join(named)}): "
                f"reward[{number}].teacher is {reward.teacher}",
                "correct the name",
            )
        yield (
            bool(judges) and self.replay is not None and self.replay.local is not None,
            "replay.local must be null with a judge: the local provider knows the desk alone",
            "remove it, and give the teacher its key",
        )
        yield (
            episodes is not None and episodes.max_context > self.train.row_tokens,
            f"episodes.max_context must be <= train.row_tokens ({self.train.row_tokens})",
            "an episode is trained as one sequence: lower it or raise train.row_tokens",
        )
        facts = self.data.facts
        yield (
            episodes is not None and facts is not None and episodes.cases > facts,
            f"episodes.cases must be <= data.facts ({facts}), the fields of a handbook",
            "lower it, or raise data.facts",
        )
        yield (
            episodes is not None and episodes.cases > 1 and episodes.max_turns < 3 * episodes.cases,
            "episodes.max_turns must be >= 3 x episodes.cases: a case takes three calls",
            "raise it, or lower episodes.cases",
        )
        if self.learns_from_rewards:
            yield from self._of_rewards()

    def _of_verified_turns(self) -> Iterator[Rule]:
        """Yield what turns that the document's teacher verifies need."""
        objective, verified = self.objective, self.rollout.verify is not None
        weighted = [k for k in ("w_rl", "alpha", "beta") if getattr(objective, k)]
        weighted += [f"channels.{k}" for k, weight in objective.channels.items() if weight]
        yield (
            verified and bool(weighted),
            f"rollout.verify must be null with objective.{(weighted or [''])[0]}: rewards, hints "
            "and votes judge text that the student drew, and the teacher drew a part of this",
            "remove it, or train by objective.w_doc alone",
        )
        yield (
            verified and self.train.staleness > 0,
            "rollout.verify must be null with train.staleness and episodes, which then run ahead "
            "one by one and are verified in groups",
            "set train.staleness to 0, or remove it",
        )

    def _of_handbooks(self, episodes: EpisodesSpec) -> Iterator[Rule]:
        """Yield what tasks of handbooks need."""
        data, objective = self.data, self.objective
        paths = 0 if data.path is None else len(data.path.split(os.pathsep))
        yield (
            paths > 0 and data.patients != paths,
            f"data.patients must be {paths}, the number of handbooks in data.path",
            f"set it to {paths}",
        )
        yield (
            bool(episodes.environments) or episodes.environment != EnvironmentSpec(),
            "episodes.environment must be left out with data.source handbook, whose tasks say what "
            "users and tools say",
            "remove it",
        )
        yield (episodes.cases > 1, "episodes.cases must be 1 but at desks", "remove it")
        yield (
            objective.alpha > 0 and objective.hints.hints == "template",
            f"{HINT_SOURCE} must not be template with data.source handbook, which has none",
            "set it to feedback or sibling",
        )

    def _of_environments(self, episodes: EpisodesSpec) -> Iterator[Rule]:
        """Yield what episodes in the user's own environments need."""
        played, objective = episodes.played, self.objective
        yield (
            any(e.kind == "desk" for e in played),
            "episodes.environment must be of another kind than desk with data.source environment",
            "set kind: openenv, verifiers or python, or data.source: desk",
        )
        yield (
            self.data.patients != len(played),
            f"data.patients must be {len(played)}, the number of environments",
            f"set it to {len(played)}",
        )
        yield (
            episodes.cases > 1,
            "episodes.cases must be 1 but at desks",
            "remove it",
        )
        yield (
            objective.w_doc > 0 and any(e.document is None for e in played),
            "objective.w_doc must be 0 with an environment that has no document for the teacher to "
            "read",
            "set it to 0 and w_rl to 1, or give each environment its document",
        )
        yield (
            objective.alpha > 0 and objective.hints.hints == "template",
            f"{HINT_SOURCE} must not be template with environments of your own, which have no "
            "templates here",
            "set it to feedback or sibling",
        )
        few = [e.id for e in played if e.tasks is not None and e.tasks <= self.evaluate.questions]
        yield (
            bool(few),
            f"evaluate.questions must be < the tasks of {', '.join(few)}, of which so many are "
            "held out",
            "ask fewer, or raise the environment's tasks",
        )

    def _of_judged_rows(self) -> Iterator[Rule]:
        """Yield what rewards and a dataset's rows need of each other."""
        episodes, of_rows = self.episodes, self.data.source in ROW_SOURCES
        yield (
            bool(self.reward) and episodes is None,
            "reward must be left out without episodes, which it judges",
            "add the section episodes, or remove it",
        )
        unjudged = not any(r.verifier != "environment" for r in self.reward)
        yield (
            of_rows and episodes is not None and unjudged,
            "reward must be given with episodes of rows, which have none of their own",
            "name a verifier or a function, for example reward: [{verifier: exact}]",
        )

    def _of_rewards(self) -> Iterator[Rule]:
        """Yield what training on rewards needs, from episodes or from rsa."""
        grpo = self.objective.grpo
        yield (
            self.train.staleness > 0 and grpo.mismatch is None and grpo.old == "trainer",
            "train.staleness must be 0 with episodes or rsa whose ratios have no correction for "
            "the version that sampled",
            "set it to 0, objective.grpo.old to sampler, or objective.grpo.mismatch",
        )
        buffer, most = self.objective.grpo.overlong_buffer, self.rollout.max_tokens
        yield (
            buffer is not None and buffer > most,
            f"objective.grpo.overlong_buffer must be <= rollout.max_tokens ({most})",
            "it is the last part of a turn: lower it",
        )
        drawn = self.rollout
        yield (
            (drawn.temperature, drawn.top_p, drawn.top_k) != (1.0, 1.0, 0),
            "rollout.temperature must be 1, 1 and 0 (temperature, top_p, top_k) with episodes or "
            "rsa, or ratios are biased",
            "remove the three",
        )
        offline = "offline" in self.evaluate.arms
        yield (
            offline and not self.objective.w_doc,
            "evaluate.arms must not hold offline without objective.w_doc, which alone trains on a "
            "teacher's text",
            "remove offline or set objective.w_doc",
        )
