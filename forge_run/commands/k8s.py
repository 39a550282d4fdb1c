"""Write the Kubernetes manifests of a mesh or of a server, and check manifests: `forge k8s`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from deploy.checks.check import check
from deploy.manifests.kustomization import Tree, mesh_tree, server_tree
from deploy.manifests.mesh import MeshFiles
from deploy.manifests.sizing import model_size, server_resources
from forge_run.cli import parsed_elsewhere
from protocols.files import REPOSITORY
from protocols.spec.hosts import DeploymentSpec
from protocols.spec.loading import load_file, load_serve, load_spec
from protocols.spec.yaml_source import read_yaml

MONITORING = REPOSITORY / "deploy" / "monitoring"
PODS = "hosts.kind=kubernetes"
CARTRIDGE_TOKENS = 2048  # assumed: only the cartridge store knows the sizes


def check_command(*, paths: Sequence[str]) -> int:
    """Print findings and notes of manifests, a line each; return 1 where there are findings, else
    0. Raises SpecError for paths without manifests."""
    found = check(paths, parsed_elsewhere)
    for note in found.notes:
        print(f"note: {note}")
    for fault in found.findings:
        print(fault)
    count = len(found.findings)
    said = f"{count} finding{'s' if count > 1 else ''}" if count else "sound"
    print(f"{found.objects} objects: {said}")
    return 1 if count else 0


def command(*, mesh: str, sets: Sequence[str], values: Path | None, out: Path) -> int:
    """Write the manifests under `out` and print their paths. Raises SpecError."""
    for name, text in render(mesh, sets, values).items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


def render(mesh: str, sets: Sequence[str] = (), values: Path | None = None) -> Tree:
    """Return the manifests of a mesh, or of a server's `meshes/serve.yaml`, for a cluster of the
    values in a file: texts by path. Raises SpecError for what the cluster would not hold."""
    given = DeploymentSpec() if values is None else load_file(DeploymentSpec, values)
    name = "" if values is None else values.name
    if "config" in read_yaml(Path(mesh), mesh).values:
        return _mesh(mesh, sets, given, name)
    return _server(mesh, sets, given, name)


def _mesh(mesh: str, sets: Sequence[str], values: DeploymentSpec, values_name: str) -> Tree:
    spec = load_spec(mesh, sets=(*sets, PODS)).spec  # refuse now what cannot run in pods
    config = Path(spec.mesh.config)
    files = MeshFiles(
        mesh_name=Path(mesh).name,
        mesh_text=Path(mesh).read_text(encoding="utf-8"),
        config_name=os.path.relpath(config, Path(mesh).absolute().parent),
        config_text=config.read_text(encoding="utf-8"),
        sets=tuple(sets),
        values_name=values_name,
    )
    rules: Mapping[str, Any] = yaml.safe_load((MONITORING / "rules.yml").read_bytes())
    dashboard = (MONITORING / "dashboard.json").read_text(encoding="utf-8")
    return mesh_tree(spec, files, model_size(spec.learn.model), rules, dashboard, values)


def _server(mesh: str, sets: Sequence[str], values: DeploymentSpec, values_name: str) -> Tree:
    spec = load_serve(mesh, sets=sets).spec
    text = Path(mesh).read_text(encoding="utf-8")
    files = MeshFiles(Path(mesh).name, text, "", "", tuple(sets), values_name)
    resources = server_resources(spec, model_size(spec.model), CARTRIDGE_TOKENS)
    return server_tree(spec, files, resources, values)
