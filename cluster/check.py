"""Whether the committed manifests are what is rendered, and what they build is sound.

    drift        the committed files against a fresh render, file by file
    build        the kustomizations: patches that meet nothing, files that are not there
    schema       built-in kinds, kubernetes-validate, strict
    custom       MonarchMesh, PodMonitor, PrometheusRule, by deploy/k8s/crds
    references   what objects name of each other
    labels       the labels that all carry
    hardening    rights, bounds, secrets, networks

No cluster is asked. `python -m forge_run.commands.k8s_check` puts them to deploy/k8s; schemas need
the `dev` extra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cluster.hardening import unsafe
from cluster.parts import Object
from cluster.references import dangling, unlabelled
from cluster.schemas import built_in, custom

KUBERNETES = Path(__file__).parents[1] / "deploy" / "k8s"


def faults(
    objects: Sequence[Object], definitions: Sequence[Mapping[str, Any]]
) -> dict[str, list[str]]:
    """The faults that each check finds in one built target; those that find none are left out.

    Where an object is not of its kind's shape, the checks that read it as such are not asked.
    """
    shapes = {"schema": built_in(objects), "custom": custom(objects, definitions)}
    if any(shapes.values()):
        return {name: lines for name, lines in shapes.items() if lines}
    found = {
        "references": dangling(objects),
        "labels": unlabelled(objects),
        "hardening": unsafe(objects),
    }
    return {name: lines for name, lines in found.items() if lines}


def drift(committed: Mapping[str, str], rendered: Mapping[str, str]) -> list[str]:
    """How the committed files differ from what is rendered."""
    lines = [f"{path}: is not committed" for path in sorted(rendered.keys() - committed.keys())]
    lines += [f"{path}: is not rendered" for path in sorted(committed.keys() - rendered.keys())]
    both = sorted(committed.keys() & rendered.keys())
    return lines + [f"{p}: differs from its render" for p in both if committed[p] != rendered[p]]


def definitions() -> list[dict[str, Any]]:
    """The custom kinds' definitions, which are written by hand."""
    return [yaml.safe_load(path.read_bytes()) for path in sorted(KUBERNETES.glob("crds/*.yaml"))]


def committed() -> dict[str, str]:
    """The rendered files as they lie in the repository: text by path."""
    paths = sorted(path for path in KUBERNETES.rglob("*.yaml") if path.parent.name != "crds")
    return {str(path.relative_to(KUBERNETES)): path.read_text(encoding="utf-8") for path in paths}
