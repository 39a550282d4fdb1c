"""Configure `forge frontier`: the typed `configs/frontier.yaml`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from protocols.spec.base import AsTuple, SpecSection, broken


class FrontierArm(SpecSection):
    """Configure one strategy with its options and its token budget."""

    strategy: str = Field(min_length=1, description="a name of strategies.catalog")
    options: dict[str, Any] = Field(default={}, description="of the strategy; others: its defaults")
    budget: int | None = Field(default=None, ge=1, description="most tokens sampled for a question")

    @property
    def name(self) -> str:
        """Return the arm's name: `"self_consistency samples=8"`."""
        told = [f"{key}={value}" for key, value in self.options.items()]
        return " ".join([self.strategy, *told, *([f"budget={self.budget}"] if self.budget else [])])


class FrontierSpec(SpecSection):
    """Configure arms that answer the same held-out questions over the same cartridges."""

    questions: int = Field(default=200, ge=1, description="most held-out questions")
    max_tokens: int = Field(default=32, ge=1, description="most tokens of one response")
    temperature: float = Field(default=1.0, gt=0, description="of every sample")
    seed: int = Field(default=0, ge=0, description="seed of every draw")
    arms: Annotated[tuple[FrontierArm, ...], AsTuple] = Field(
        min_length=1, description="what is compared; the first is what the others are held against"
    )

    @field_validator("arms")
    @classmethod
    def _once(cls, arms: tuple[FrontierArm, ...]) -> tuple[FrontierArm, ...]:
        names = [arm.name for arm in arms]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise broken("must list each arm once", f"remove the second {twice[0]}")
        return arms
