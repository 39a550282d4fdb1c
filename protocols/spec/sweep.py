"""Configure `forge sweep`: the typed `configs/sweep_*.yaml`."""

from __future__ import annotations

from itertools import product
from typing import Annotated, Any

from pydantic import Field, field_validator

from protocols.spec.base import AsTuple, SpecSection, broken

Sets = dict[str, Any]  # dotted key of the mesh or the config -> value


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
    seeds: int = Field(default=3, ge=1, description="seeds of each: 0, 1, ...")
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

    @field_validator("axes")
    @classmethod
    def _values_once(cls, axes: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        for key, values in axes.items():
            told = [repr(v) for v in values]
            if not told or len(told) != len(set(told)):
                raise broken(
                    f"must list values of {key}, each once", "add one or remove what is there twice"
                )
        return axes

    @field_validator("variants")
    @classmethod
    def _names_once(cls, variants: tuple[VariantSpec, ...]) -> tuple[VariantSpec, ...]:
        names = [name for variant in variants for name in variant.arms.values()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise broken("must give each arm a name of its own", f"rename one {twice[0]}")
        return variants

    def points(self) -> list[dict[str, Any]]:
        """Return every combination of the axes' values, the last axis fastest."""
        return [
            dict(zip(self.axes, values, strict=True)) for values in product(*self.axes.values())
        ]
