"""A small sweep, and its plan."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from cartridge_forge.forge_run.experiments.sweep import planned
from cartridge_forge.forge_run.experiments.trials import Trial
from cartridge_forge.plugins.evaluate.spec import SweepSpec

REPOSITORY = Path(__file__).parents[4]
MESH = str(REPOSITORY / "meshes" / "longhealth.yaml")
SPEC = SweepSpec(
    name="small", mesh=MESH, seeds=2, seed_keys=("train.seed", "data.seed"), reference="offline",
    set={"train.steps": 9, "train.warm_start": None, "roles.generator.threads": 1},
    axes={"cartridge.tokens": (60, 12)},
    variants=[
        {"arms": {"document": "document", "offline": "offline", "on_policy": "on policy"}},
        {"set": {"train.warm_start": {"steps": 3}}, "arms": {"on_policy": "hybrid"}},
    ],
)  # fmt: skip


@cache
def plan_of(seeds: int | None = None) -> tuple[Trial, ...]:
    """Return the trials of the sweep."""
    return planned(SPEC, MESH, seeds=seeds)
