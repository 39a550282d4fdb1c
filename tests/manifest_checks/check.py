"""`make k8s-check`: deploy/k8s against a fresh render, and every overlay against every check.

    drift        the committed files against a fresh render, file by file
    build        the kustomizations: patches that meet nothing, files that are not there
    schema       built-in kinds, kubernetes-validate, strict
    custom       MonarchMesh, PodMonitor, PrometheusRule, by deploy/k8s/crds
    references   what objects name of each other
    labels       the labels that all carry
    hardening    rights, bounds, secrets, networks

No cluster is asked. Schemas need the `dev` extra.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from deploy.manifests.objects import Object
from forge_run.commands.k8s import render
from manifest_checks.hardening import unsafe
from manifest_checks.kustomize import build, targets
from manifest_checks.references import dangling, unlabelled
from manifest_checks.schemas import built_in, custom
from protocols.errors import SpecError

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "k8s"
# What deploy/k8s holds: the mesh files, and the overrides that they are rendered with.
COMMITTED = {"meshes/three_channels.yaml": ("replay.local=null",), "meshes/serve.yaml": ()}
PROVISIONING = "overlays/with-provisioning"  # no overlay of the tree takes this component


def faults(
    objects: Sequence[Object], definitions: Sequence[Mapping[str, Any]]
) -> dict[str, list[str]]:
    """Return the faults that each check finds in one built target, without those that find none.

    Where an object is not of its kind's shape, the checks that read it as such are not asked.
    """
    found = {"schema": built_in(objects), "custom": custom(objects, definitions)}
    if not any(found.values()):
        found |= {
            "references": dangling(objects),
            "labels": unlabelled(objects),
            "hardening": unsafe(objects),
        }
    return {name: lines for name, lines in found.items() if lines}


def drift(committed: Mapping[str, str], rendered: Mapping[str, str]) -> list[str]:
    """Return how the committed files differ from what is rendered."""
    lines = [f"{path}: is not committed" for path in sorted(rendered.keys() - committed.keys())]
    lines += [f"{path}: is not rendered" for path in sorted(committed.keys() - rendered.keys())]
    both = sorted(committed.keys() & rendered.keys())
    return lines + [f"{p}: differs from its render" for p in both if committed[p] != rendered[p]]


def definitions() -> list[dict[str, Any]]:
    """Read the custom kinds' definitions, which are written by hand."""
    return [yaml.safe_load(path.read_bytes()) for path in sorted(KUBERNETES.glob("crds/*.yaml"))]


def committed() -> dict[str, str]:
    """Read the rendered files as they lie in the repository: text by path."""
    paths = sorted(path for path in KUBERNETES.rglob("*.yaml") if path.parent.name != "crds")
    return {str(path.relative_to(KUBERNETES)): path.read_text(encoding="utf-8") for path in paths}


def rendered() -> dict[str, str]:
    """Render every file of deploy/k8s: text by path."""
    tree: dict[str, str] = {}
    for mesh, sets in COMMITTED.items():
        tree |= render(str(ROOT / mesh), sets)
    return tree


def found(tree: Mapping[str, str]) -> Iterator[str]:
    """Yield every fault as a line: `overlays/gpu: references: Job/controller: ...`."""
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
