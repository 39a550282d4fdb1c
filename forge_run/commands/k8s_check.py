"""`make k8s-check`: deploy/k8s against a fresh render, and every overlay against every check."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from cluster.check import committed, definitions, drift, faults
from cluster.kustomize import build, targets
from forge_run.commands.k8s import MONITORING, render
from protocols.errors import SpecError

COMMITTED = {"meshes/three_channels.yaml": ("replay.local=null",), "meshes/serve.yaml": ()}
"""What deploy/k8s holds: the mesh files, and the overrides that they are rendered with."""

PROVISIONING = "overlays/with-provisioning"  # no overlay of the tree takes this component


def rendered() -> dict[str, str]:
    """Every file of deploy/k8s that is rendered, by path. Relative to the repository's root."""
    root = MONITORING.parents[1]
    tree: dict[str, str] = {}
    for mesh, sets in COMMITTED.items():
        # The name is as the committed files say it; the file is found from anywhere.
        tree |= render(str(root / mesh), sets)
    return tree


def found(tree: Mapping[str, str]) -> Iterator[str]:
    """Every fault, a line: `overlays/gpu: references: Job/controller: ...`."""
    yield from (f"drift: {line}" for line in drift(tree, rendered()))
    also = "resources: [../../base]\ncomponents: [../../components/provisioning]\n"
    whole = {**tree, f"{PROVISIONING}/kustomization.yaml": also}
    kinds = definitions()
    for target in targets(whole):
        try:
            objects = build(whole, target)
        except SpecError as error:
            yield f"{target}: build: {error}"
            continue
        for check, lines in faults(objects, kinds).items():
            yield from (f"{target}: {check}: {line}" for line in lines)


def main() -> int:
    tree = committed()
    lines = list(found(tree))
    print("\n".join(lines) or f"{len(tree)} files, {len(targets(tree))} overlays: sound")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
