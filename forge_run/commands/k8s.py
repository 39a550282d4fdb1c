"""Write the Kubernetes manifests or the Helm chart of a mesh or of a server, and check manifests:
`forge k8s`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cartridge_forge.forge_run.cli import parsed_elsewhere
from cartridge_forge.plugins.cluster.chart.chart import Needs, chart_tree, least_needs
from cartridge_forge.plugins.cluster.checks.check import check
from cartridge_forge.plugins.cluster.manifests.kustomization import Tree, mesh_tree, server_tree
from cartridge_forge.plugins.cluster.manifests.mesh import MeshFiles
from cartridge_forge.plugins.cluster.manifests.objects import IMAGE, dashed, settings
from cartridge_forge.plugins.cluster.manifests.sizing import model_size, server_resources
from cartridge_forge.plugins.cluster.spec import DeploymentSpec, GpuClassSpec
from cartridge_forge.plugins.serve.spec import load_serve
from cartridge_forge.plugins.spec_files.keys import named_mesh
from cartridge_forge.plugins.spec_files.loading import load_file, load_spec
from cartridge_forge.plugins.spec_files.yaml_source import read_yaml
from cartridge_forge.protocols.files import REPOSITORY

MONITORING = REPOSITORY / "deploy" / "monitoring"
PODS = "hosts.kind=kubernetes"
CARTRIDGE_TOKENS = 2048  # assumed: only the cartridge store knows the sizes


def check_command(*, paths: Sequence[str]) -> int:
    """Print findings and notes of manifests, a line each; return 1 where there are findings, else
    0. Raises SpecError for paths without manifests."""
    report = check(paths, parsed_elsewhere)
    for note in report.notes:
        print(f"note: {note}")
    for fault in report.findings:
        print(fault)
    count = len(report.findings)
    summary = f"{count} finding{'s' if count > 1 else ''}" if count else "sound"
    print(f"{report.objects} objects: {summary}")
    return 1 if count else 0


def command(*, mesh: str, sets: Sequence[str], values: Path | None, out: Path) -> int:
    """Write the manifests under `out` and print their paths. Raises SpecError."""
    _write(render(mesh, sets, values), out)
    return 0


def chart_command(*, mesh: str, sets: Sequence[str], out: Path) -> int:
    """Write a Helm chart under `out` and print the paths. Raises SpecError."""
    _write(chart(mesh, sets), out)
    return 0


def _write(tree: Tree, out: Path) -> None:
    for name, text in tree.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)


def render(mesh: str, sets: Sequence[str] = (), values: Path | None = None) -> Tree:
    """Return the manifests of a mesh, or of a server's `meshes/serve.yaml`, for a cluster of the
    values in a file: texts by path. Raises SpecError for what the cluster would not hold."""
    deployment = DeploymentSpec() if values is None else load_file(DeploymentSpec, values)
    name = "" if values is None else values.name
    if _is_mesh(mesh):
        return _mesh(mesh, sets, deployment, name)
    return _server(mesh, sets, deployment, name)


def chart(mesh: str, sets: Sequence[str] = ()) -> Tree:
    """Return the Helm chart of a mesh or of a server, for every cluster: texts by path. Raises
    SpecError for a model that no pod would have."""
    # The chart's schema holds the least memory of a GPU, against the values that Helm is given.
    any_gpu = DeploymentSpec(gpu=GpuClassSpec(gb=sys.float_info.max))
    least = Needs()
    if _is_mesh(mesh):
        tree = _mesh(mesh, sets, any_gpu, "")
        spec = load_spec(mesh, sets=(*sets, PODS)).spec
        least, name = least_needs(spec, model_size(spec.learn.model)), spec.mesh.name
    else:
        tree, name = _server(mesh, sets, any_gpu, ""), load_serve(mesh, sets=sets).spec.name
    file = named_mesh(mesh)[0].name
    command_text = " ".join(["forge k8s chart", f"meshes/{file}", *settings(*sets)])
    return chart_tree(tree, f"forge-{dashed(name)}", IMAGE.rpartition(":")[2], least, command_text)


def _is_mesh(mesh: str) -> bool:
    return "config" in read_yaml(*named_mesh(mesh)).values


def _mesh(mesh: str, sets: Sequence[str], values: DeploymentSpec, values_name: str) -> Tree:
    spec = load_spec(mesh, sets=(*sets, PODS)).spec  # refuse now what cannot run in pods
    config, (path, _) = Path(spec.mesh.config), named_mesh(mesh)
    files = MeshFiles(
        mesh_name=path.name,
        mesh_text=path.read_text(encoding="utf-8"),
        config_name=os.path.relpath(config, path.absolute().parent),
        config_text=config.read_text(encoding="utf-8"),
        sets=tuple(sets),
        values_name=values_name,
    )
    rules: Mapping[str, Any] = yaml.safe_load((MONITORING / "rules.yml").read_bytes())
    dashboard = (MONITORING / "dashboard.json").read_text(encoding="utf-8")
    return mesh_tree(spec, files, model_size(spec.learn.model), rules, dashboard, values)


def _server(mesh: str, sets: Sequence[str], values: DeploymentSpec, values_name: str) -> Tree:
    spec = load_serve(mesh, sets=sets).spec
    path, _ = named_mesh(mesh)
    text = path.read_text(encoding="utf-8")
    files = MeshFiles(path.name, text, "", "", tuple(sets), values_name)
    resources = server_resources(spec, model_size(spec.model), CARTRIDGE_TOKENS)
    return server_tree(spec, files, resources, values)
