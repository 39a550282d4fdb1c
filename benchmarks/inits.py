"""Accuracy by where training starts, before it and after some steps of it, on policy:

    python -m benchmarks.inits [MESH] [--seeds 1] [--out inits.json] [--set key.path=value]...

One whole `forge-run` for each `cartridge.init` and `train.seed`, one after the other, and nothing
else different: documents, questions and their draws are the same. The first seed is the config's.
Intervals are Wilson's over all questions of all seeds; the same questions are asked with every
seed, so between seeds they are narrower than independent questions would give.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, get_args

from benchmarks.provenance import provenance
from forge_run.child_run import run_apart
from protocols.intervals import wilson_interval
from protocols.learn_spec import Init
from protocols.spec_loading import load_spec
from services.rundir import RunDirectory

PLAIN = (
    "evaluate.arms=[untrained, on_policy]",
    "evaluate.probe_every=0",
    "evaluate.sampled=false",
)  # fmt: skip
ARMS = ("untrained", "on_policy")


def measured(mesh: str, sets: list[str], root: Path, init: str, seed: int) -> dict[str, Any]:
    """accuracy and n of both arms, and doc_kl of the first and last step."""
    sets = [*PLAIN, *sets, f"cartridge.init={init}", f"train.seed={seed}"]
    name = load_spec(mesh, sets=sets).spec.mesh.name
    words = [mesh, "--run-dir", str(root), *(w for text in sets for w in ("--set", text))]
    root.mkdir(parents=True, exist_ok=True)
    run = run_apart(f"{init}, seed {seed}", words, root / f"{init}-{seed}.log")
    results = RunDirectory(root / name / run).read_results() or {}
    arms = {arm: {k: results["arms"][arm][k] for k in ("accuracy", "n")} for arm in ARMS}
    return {"init": init, "seed": seed, "run": run, "kl": results["kl"], **arms}


def line(runs: list[dict[str, Any]]) -> str:
    """One init's row of the table."""
    cells = [runs[0]["init"]]
    for arm in ARMS:
        n = sum(run[arm]["n"] for run in runs)
        right = round(sum(run[arm]["accuracy"] * run[arm]["n"] for run in runs))
        low, high = wilson_interval(right, n)
        cells.append(f"{right / n:.1%} ({low:.1%} to {high:.1%})")
    for end in ("first", "last"):
        cells.append(f"{sum(run['kl'][end] for run in runs) / len(runs):.3f}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("mesh", nargs="?", default="meshes/longhealth.yaml")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/inits"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="sets")
    given = parser.parse_args()
    first = load_spec(given.mesh, sets=given.sets).spec.learn.train.seed
    print("| init | untrained | trained | doc_kl, first step | last |\n|---|---|---|---|---|")
    found = []
    for init in get_args(Init):
        runs = [
            measured(given.mesh, given.sets, given.run_dir.absolute(), init, first + i)
            for i in range(given.seeds)
        ]
        found += runs
        print(line(runs), flush=True)
    if given.out is not None:
        told = {"config": vars(given), **provenance(), "runs": found}
        given.out.write_text(json.dumps(told, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
