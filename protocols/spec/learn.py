"""Configure what a run learns, the typed `configs/*.yaml`: the core's sections, and the rules
between them. Each section checks its own rules; plug-ins add sections and rules by subclasses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from cartridge_forge.protocols.plugins import Kind
from cartridge_forge.protocols.spec.base import JoinedSection, Rule, SpecSection, broken
from cartridge_forge.protocols.spec.cartridge import CartridgeSpec
from cartridge_forge.protocols.spec.model import ModelSpec
from cartridge_forge.protocols.spec.sections import (
    OF_DOCUMENT,
    EvaluateSpec,
    GeneratorSpec,
    LossSpec,
    ObjectiveSpec,
    RolloutSpec,
    TeacherSpec,
    TrainSpec,
)
from cartridge_forge.protocols.spec.services import StoredPlace


@dataclass(frozen=True)
class RoleFacts:
    """Hold what the actors of plug-ins' roles get from their run: the role's `replicas`, seconds of
    a call, the run's `id`, the path of its ledger, and where its files go from other hosts."""

    replicas: int
    call_timeout_s: float
    id: str
    ledger: str
    stored: StoredPlace | None


class LearnSpec(JoinedSection):
    """Hold a learning config, `configs/*.yaml`. A plug-in's subclass adds sections, and extends the
    properties here by `super()`: which recipe trains, which roles are needed, what they get."""

    table: ClassVar[Kind] = "configs"
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # property of a `ReadWith` -> keys

    model: ModelSpec = Field(description="the frozen base model")
    cartridge: CartridgeSpec = Field(description="the trainable KV prefix of one document")
    rollout: RolloutSpec = Field(description="the student's own sampling")
    generator: GeneratorSpec = Field(
        default=GeneratorSpec(), description="what runs the generators"
    )
    teacher: TeacherSpec = Field(
        default=TeacherSpec(), description="the model that has the document"
    )
    loss: Annotated[LossSpec, OF_DOCUMENT] = Field(
        default=LossSpec(), description="student against teacher"
    )
    objective: ObjectiveSpec = Field(
        default=ObjectiveSpec(), description="the channels and their weights"
    )
    train: TrainSpec = Field(description="the optimiser")
    evaluate: EvaluateSpec = Field(default=EvaluateSpec(), description="held-out questions")

    @property
    def recipe(self) -> str:
        """Return the name of the recipe that trains it, of `protocols.plugins`; "" for none."""
        return ""

    @property
    def learns_from_rewards(self) -> bool:
        """Return whether a rollout is an episode with a reward, not a response to a prompt."""
        return False

    @property
    def cartridges(self) -> int:
        """Return the number of cartridges; by document, at most."""
        return len(self.cartridge.groups or ()) or 1

    @property
    def needed_roles(self) -> frozenset[str]:
        """Return the names of the roles that training needs."""
        reads = {"doc_teacher"} if self.objective.reads_document else set()
        return frozenset({"generator", "trainer"} | reads)

    @property
    def rollouts_together(self) -> int:
        """Return the rollouts of a step that ask roles for themselves; 0 for prompts in batches."""
        return 0

    @property
    def samples_answers(self) -> bool:
        """Return whether answers of an evaluation are sampled in any case."""
        return False

    @property
    def roles_here(self) -> tuple[str, ...]:
        """Return the roles that run on the controller's host, wherever the others do."""
        return ()

    @property
    def role_secrets(self) -> Mapping[str, tuple[str, ...]]:
        """Return by role the environment variables with the secrets that it needs."""
        return {}

    def role_arguments(self, name: str, run: RoleFacts) -> tuple[Any, ...]:
        """Return the constructor arguments of the actor of a plug-in's role."""
        raise KeyError(name)

    @model_validator(mode="after")
    def _across(self) -> Self:
        for is_broken, text, remedy in self.rules():
            if is_broken:
                key, _, rule = text.partition(" ")
                got = attrgetter(key)(self)
                got_text = "a section" if isinstance(got, SpecSection) else got
                raise broken(rule, remedy, key=key, got=got_text)
        return self

    def rules(self) -> Iterator[Rule]:
        """Yield the rules between sections; the first that is broken is reported."""
        row, most = self.train.row_tokens, self.rollout.max_tokens
        yield (
            self.generator.backend == "llama.cpp",
            "generator.backend must not be llama.cpp in training, whose quantised weights are not "
            "those that the trainer computes with",
            "set torch or vllm; forge ask and forge serve take llama.cpp",
        )
        yield (
            most >= row,
            f"rollout.max_tokens must be < train.row_tokens ({row})",
            "a sequence holds the prompt too: lower it or raise train.row_tokens",
        )
        yield (
            self.loss.temperature != 1.0 and self.teacher.top_k != "full",
            "loss.temperature must be 1 with a top-k teacher, which sends no whole distribution to "
            "divide",
            "set it to 1 or teacher.top_k to full",
        )
        warm = None if self.train.warm_start is None else self.train.warm_start.loss
        for key, loss in (("loss", self.loss), ("train.warm_start.loss", warm)):
            yield (
                loss is not None and loss.form == "pairs" and loss.direction != "cross_entropy",
                f"{key}.form belongs to {key}.direction cross_entropy alone, for it is no "
                "divergence",
                f"use tail, or set {key}.direction: cross_entropy",
            )
