"""Configure the commands that compare runs: `configs/eval.yaml` of `forge eval`,
`configs/frontier.yaml` of `forge frontier`, and `configs/sweep_*.yaml` of `forge sweep`."""

from __future__ import annotations

from itertools import product
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from cartridge_forge.plugins.spec_files.keys import SpecFile
from cartridge_forge.plugins.strategies.spec import ProcessRewardSpec
from cartridge_forge.protocols.spec.base import AsTuple, SpecSection, broken, repeated

Sets = dict[str, Any]  # dotted key of the mesh or the config -> value


class EvalSpec(SpecSection):
    """Configure the questions, passages and probes that every arm answers."""

    questions: int = Field(default=200, ge=1, description="most questions about the documents")
    max_tokens: int | None = Field(
        default=None, ge=1, description="most tokens of an answer; null: the run's evaluate section"
    )
    retriever: Literal["bm25", "embeddings"] = Field(
        default="bm25", description="what ranks the passages of the arms retrieved*"
    )
    passages: int = Field(
        default=4, ge=0, description="passages of each document that are read word by word"
    )
    passage_tokens: int = Field(default=48, ge=8, description="tokens of a passage")
    own_tokens: int = Field(
        default=0,
        ge=0,
        description="tokens that an arm writes where a passage is asked for, before the teacher "
        "goes on with as many, which the arm then reads; 0: not measured",
    )
    free_tokens: int = Field(
        default=48,
        ge=0,
        description="tokens that an arm writes where a passage is asked for, greedily and sampled, "
        "which the teacher reads; every question is then answered by sampling too; 0: not measured",
    )
    probes: int = Field(
        default=24, ge=0, description="questions that no document answers, to see what is forgotten"
    )
    formats: bool = Field(
        default=True,
        description="ask for answers in given forms, to see whether they are obeyed; of documents "
        "and handbooks",
    )
    resamples: int = Field(default=10_000, ge=100, description="bootstrap samples of the questions")
    seed: int = Field(default=0, ge=0, description="seed of every draw")
    contamination: Literal["fail", "warn"] | None = Field(
        default=None,
        description="what training prompts that double the questions do; null: as the run's",
    )


class FrontierArm(SpecSection):
    """Configure one strategy with its options and its token budget."""

    strategy: str = Field(min_length=1, description="a name of strategies.catalog")
    options: dict[str, Any] = Field(default={}, description="of the strategy; others: its defaults")
    budget: int | None = Field(default=None, ge=1, description="most tokens sampled for a question")

    @property
    def name(self) -> str:
        """Return the arm's name: `"self_consistency samples=8"`."""
        options = [f"{key}={value}" for key, value in self.options.items()]
        return " ".join(
            [self.strategy, *options, *([f"budget={self.budget}"] if self.budget else [])]
        )


class FrontierSpec(SpecSection):
    """Configure arms that answer the same held-out questions over the same cartridges."""

    questions: int = Field(default=200, ge=1, description="most held-out questions")
    parts: int = Field(
        default=1,
        ge=1,
        description="1: the held-out option questions; more: questions of so many fields of "
        "charts of the embedded clinic, right if all are",
    )
    charts: int = Field(
        default=1,
        ge=1,
        description="charts that a question of several parts is about, with as many parts of each; "
        "request i of a call is sampled over the cartridge of chart i modulo charts",
    )
    max_tokens: int = Field(default=32, ge=1, description="most tokens of one response")
    temperature: float = Field(default=1.0, gt=0, description="of every sample")
    seed: int = Field(default=0, ge=0, description="seed of every draw")
    process_reward: ProcessRewardSpec | None = Field(
        default=None, description="what arms with the scorer process_reward ask; null: none"
    )
    arms: Annotated[tuple[FrontierArm, ...], AsTuple] = Field(
        min_length=1, description="what is compared; the first is what the others are held against"
    )

    @model_validator(mode="after")
    def _divided(self) -> FrontierSpec:
        if self.charts > 1 and self.parts % self.charts:
            raise broken(
                f"charts must divide parts: {self.charts} and {self.parts}",
                f"set parts to a multiple of {self.charts}",
            )
        return self

    @field_validator("arms")
    @classmethod
    def _once(cls, arms: tuple[FrontierArm, ...]) -> tuple[FrontierArm, ...]:
        if twice := repeated([arm.name for arm in arms]):
            raise broken("must list each arm once", f"remove the second {twice}")
        return arms


class VariantSpec(SpecSection):
    """Configure a way to train, and which of the run's arms are shown under which names."""

    set: Sets = Field(default={}, description="keys that it sets, over the sweep's own")
    arms: dict[str, str] = Field(
        min_length=1,
        description="arms of the run that are evaluated -> their names in the table: "
        "{on_policy: hybrid}",
    )


class SweepSpec(SpecSection):
    """Configure every combination of the axes' values, trained in every variant, over seeds."""

    name: str = Field(pattern=r"^[a-z0-9_-]+$", description="names the folder of its results")
    mesh: str = Field(min_length=1, description="the mesh that is run, relative to this file")
    seeds: int = Field(default=3, ge=1, description="seeds of each: first_seed, the next, ...")
    first_seed: int = Field(
        default=0,
        ge=0,
        description="the first seed: documents that settings were chosen on are out",
    )
    seed_keys: Annotated[tuple[str, ...], AsTuple] = Field(
        default=("train.seed",), min_length=1, description="dotted keys that take the seed"
    )
    set: Sets = Field(default={}, description="keys of all runs")
    axes: dict[str, Annotated[tuple[Any, ...], AsTuple]] = Field(
        default={}, description="dotted key -> its values; every combination is run"
    )
    variants: Annotated[tuple[VariantSpec, ...], AsTuple] = Field(
        min_length=1, description="ways to train, each of which is a run for every combination"
    )
    reference: str | None = Field(
        default=None, description="the arm that the others are compared with, seed by seed"
    )
    frontier: FrontierSpec | None = Field(
        default=None,
        description="strategies that are compared over every finished run, as by `forge frontier`",
    )

    @field_validator("axes")
    @classmethod
    def _values_once(cls, axes: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        for key, values in axes.items():
            texts = [repr(v) for v in values]
            if not texts or len(texts) != len(set(texts)):
                raise broken(
                    f"must list values of {key}, each once", "add one or remove what is there twice"
                )
        return axes

    @field_validator("variants")
    @classmethod
    def _names_once(cls, variants: tuple[VariantSpec, ...]) -> tuple[VariantSpec, ...]:
        if twice := repeated([name for variant in variants for name in variant.arms.values()]):
            raise broken("must give each arm a name of its own", f"rename one {twice}")
        return variants

    def points(self) -> list[dict[str, Any]]:
        """Return every combination of the axes' values, the last axis fastest."""
        return [
            dict(zip(self.axes, values, strict=True)) for values in product(*self.axes.values())
        ]


SWEEP_FILE = SpecFile(SweepSpec, "a sweep", "configs/sweep_*.yaml", "run it with forge sweep {}")
EVAL_FILE = SpecFile(
    EvalSpec, "an evaluation", "configs/eval.yaml", "use it with forge eval RUN --spec {}"
)
