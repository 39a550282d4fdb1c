"""Measure what each loss channel adds and costs: `forge ablate MESH.yaml`.

An ablation is a sweep of five variants, run in sequence; the first four form a 2 x 2 design:

    grpo       the policy gradient alone
    +sdpo      grpo and hint distillation
    +replay    grpo and the teachers' preferences
    all        grpo and both
    all+doc    all and document distillation, where the config weighs it
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cartridge_forge.forge_run.experiments.child_run import run_side_by_side
from cartridge_forge.forge_run.experiments.sweep import PLAIN, planned, sweep
from cartridge_forge.forge_run.experiments.table import table
from cartridge_forge.forge_run.experiments.trials import Trial, require_all
from cartridge_forge.plugins.episodes.spec.learn import EpisodesLearn
from cartridge_forge.plugins.evaluate.spec import SweepSpec
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.statistics.formatting import TableSection
from cartridge_forge.protocols.errors import SpecError

# Keys that switch off an arm's channels. They override the user's --set.
NO_DOC, NO_SDPO = {"objective.w_doc": 0}, {"objective.alpha": 0}
NO_REPLAY = {"objective.beta": 0, "replay": None}
ARMS: Mapping[str, Mapping[str, Any]] = {
    "grpo": NO_DOC | NO_SDPO | NO_REPLAY,
    "+sdpo": NO_DOC | NO_REPLAY,
    "+replay": NO_DOC | NO_SDPO,
    "all": NO_DOC,
    "all+doc": {},
}


def ablation(
    mesh: str, *, overlays: Sequence[str], sets: Sequence[str], seeds: int
) -> tuple[SweepSpec, tuple[Trial, ...]]:
    """Return the sweep of a mesh's channels and its trials; the first seed is the config's. Raises
    SpecError for a mesh without episodes or with a zero-weight channel."""
    sets = ("objective.compare_every=0", *sets)
    base = load_spec(mesh, overlays=overlays, sets=(*PLAIN, *sets))
    learn, objective = EpisodesLearn.of(base.spec.learn), base.spec.learn.objective
    if learn.episodes is None:
        raise SpecError(
            f"an ablation needs episodes, which its arms learn from: {mesh} has none; add the "
            "section episodes to its config, or ablate meshes/three_channels.yaml"
        )
    for key in ("w_rl", "alpha", "beta"):
        if getattr(objective, key) == 0:
            raise SpecError(
                f"objective.{key} must be > 0 for an ablation, which takes the channel away: "
                f"got 0 at {base.place(f'objective.{key}')}; set it"
            )
    arms = [arm for arm in ARMS if arm != "all+doc" or objective.w_doc]
    variants = [{"set": ARMS[arm], "arms": {"on_policy": arm}} for arm in arms]
    variants[0]["arms"] = {"untrained": "untrained", "on_policy": "grpo"}
    name = "ablate-" + re.sub("[^a-z0-9_-]", "-", base.spec.mesh.name.lower())
    values = {"name": name, "mesh": mesh, "variants": variants, "reference": "grpo"}
    spec = SweepSpec.model_validate({**values, "first_seed": learn.train.seed})
    return spec, planned(spec, mesh, overlays=overlays, sets=sets, seeds=seeds)


def command(
    mesh: str, *, overlays: Sequence[str], sets: Sequence[str], seeds: int, run_dir: Path | None
) -> tuple[TableSection, ...]:
    """Do the whole of `forge ablate`. Raises ForgeError for a bad spec and a failed run."""
    spec, plan = ablation(mesh, overlays=overlays, sets=sets, seeds=seeds)
    require_all(plan)
    # In sequence, as `forge run` runs them.
    runner = partial(run_side_by_side, at_once=1)
    root = (run_dir or Path("runs")).absolute()
    return table(spec, sweep(spec, plan, root, runner, partial(print, flush=True)))
