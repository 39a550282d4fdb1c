"""Accuracy by where training starts, before it and after some steps of it, on policy:

    python -m benchmarks.inits [MESH] [--seeds 1] [--out inits.json] [--set key.path=value]...

A run of the mesh's config for each `cartridge.init` and `train.seed`, in this process, and nothing
else different: documents, questions and their draws are the same. The first seed is the config's.
Intervals are Wilson's over all questions of all seeds; the same questions are asked with every
seed, so they are narrower than independent questions would give.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any, get_args

from benchmarks.record import arguments, provenance, write
from benchmarks.studying import Right, Study
from protocols.intervals import wilson_interval
from protocols.sections import Init
from protocols.spec_loading import load_spec


def measured(mesh: str, sets: list[str], init: str, seed: int) -> dict[str, Any]:
    """Right answers before and after, and doc_kl of the first and the last step."""
    sets = [*sets, f"cartridge.init={init}", f"train.seed={seed}"]
    learn = load_spec(mesh, sets=sets).spec.learn
    study = Study(learn)
    untrained = study.examined()
    kls = study.train(learn.train.steps)
    return {
        "init": init, "seed": seed, "untrained": untrained, "trained": study.examined(),
        "first_kl": kls[0], "last_kl": fmean(kls[-5:]),
    }  # fmt: skip


def share(found: list[Right]) -> str:
    """`63.1% (58.2% to 67.7%)` of the answers of all runs."""
    right, n = sum(f.right for f in found), sum(f.n for f in found)
    low, high = wilson_interval(right, n)
    return f"{right / n:.1%} ({low:.1%} to {high:.1%})"


def row(runs: list[dict[str, Any]]) -> str:
    cells = [runs[0]["init"], *(share([r[arm] for r in runs]) for arm in ("untrained", "trained"))]
    cells += [f"{fmean(r[end] for r in runs):.3f}" for end in ("first_kl", "last_kl")]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = arguments(__doc__, "inits")
    parser.add_argument("mesh", nargs="?", default="meshes/longhealth.yaml")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], dest="sets")
    given = parser.parse_args()
    told = provenance("inits", vars(given))
    first = load_spec(given.mesh, sets=given.sets).spec.learn.train.seed
    print("| init | untrained | trained | doc_kl, first step | last five |\n|---|---|---|---|---|")
    found = []
    for init in get_args(Init):
        runs = [measured(given.mesh, given.sets, init, first + i) for i in range(given.seeds)]
        found += runs
        print(row(runs), flush=True)
    plain = [{**r, **{arm: vars(r[arm]) for arm in ("untrained", "trained")}} for r in found]
    write(given.out, told, {}, plain)


if __name__ == "__main__":
    main()
