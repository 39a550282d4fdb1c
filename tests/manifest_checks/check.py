"""`make k8s-check`: deploy/k8s against a fresh render, and every overlay against `forge k8s check`.

No cluster is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from cartridge_forge.forge_run.cli import parsed_elsewhere
from cartridge_forge.forge_run.commands.k8s import render
from cartridge_forge.plugins.cluster.checks.check import check_objects
from cartridge_forge.plugins.cluster.checks.findings import Manifest
from cartridge_forge.plugins.cluster.manifests.overlays import build, targets
from cartridge_forge.protocols.errors import SpecError

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "k8s"
# What deploy/k8s holds: the mesh files, and the overrides that they are rendered with.
COMMITTED = {"meshes/three_channels.yaml": ("replay.local=null",), "meshes/serve.yaml": ()}
PROVISIONING = "overlays/with-provisioning"  # no overlay of the tree takes this component


def drift(committed: Mapping[str, str], rendered: Mapping[str, str]) -> list[str]:
    """Return how the committed files differ from what is rendered."""
    lines = [f"{path}: is not committed" for path in sorted(rendered.keys() - committed.keys())]
    lines += [f"{path}: is not rendered" for path in sorted(committed.keys() - rendered.keys())]
    both = sorted(committed.keys() & rendered.keys())
    return lines + [f"{p}: differs from its render" for p in both if committed[p] != rendered[p]]


def committed() -> dict[str, str]:
    """Read the rendered files as they lie in the repository: text by path."""
    paths = sorted(KUBERNETES.rglob("*.yaml"))
    return {str(path.relative_to(KUBERNETES)): path.read_text(encoding="utf-8") for path in paths}


def rendered() -> dict[str, str]:
    """Render every file of deploy/k8s: text by path."""
    tree: dict[str, str] = {}
    for mesh, sets in COMMITTED.items():
        tree |= render(str(ROOT / mesh), sets)
    return tree


def found(tree: Mapping[str, str]) -> Iterator[str]:
    """Yield every fault as a line, with the overlay that has it."""
    yield from (f"drift: {line}" for line in drift(tree, rendered()))
    also = "resources: [../../base]\ncomponents: [../../components/provisioning]\n"
    whole = {**tree, f"{PROVISIONING}/kustomization.yaml": also}
    for target in targets(whole):
        try:
            objects = [Manifest(value, target) for value in build(whole, target)]
        except SpecError as error:
            yield f"{target}: build: {error}"
            continue
        faults, _ = check_objects(objects, parsed_elsewhere)
        yield from map(str, faults)


def main() -> int:
    tree = committed()
    lines = list(found(tree))
    print("\n".join(lines) or f"{len(tree)} files, {len(targets(tree))} overlays: sound")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
