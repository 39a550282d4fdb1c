"""Render the files of deploy/k8s: a Kustomize base, components, and overlays.

base  <-  overlays/cpu       kind or minikube; components/scaling
      <-  overlays/gpu       H100-class nodes; components/monitoring, components/scaling
      <-  overlays/teachers  the gpu overlay with more replicas of teacher_replay
overlays/serve               the HTTP server; needs no base
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from cartridge_forge.plugins.cluster.manifests.devices import GROUP_COUNT, admitted_together
from cartridge_forge.plugins.cluster.manifests.mesh import (
    MeshFiles,
    base,
    provisioning,
    scaling,
    scope_of,
)
from cartridge_forge.plugins.cluster.manifests.objects import (
    GPU,
    ONE_NODE,
    POD_MONITOR_API,
    Object,
    Resources,
    Scope,
    dashed,
    mesh_name,
)
from cartridge_forge.plugins.cluster.manifests.server import runs, server
from cartridge_forge.plugins.cluster.manifests.sizing import ModelSize
from cartridge_forge.plugins.cluster.manifests.values import (
    fitted,
    image_of,
    on_gpu_nodes,
    require_fit,
    require_server,
)
from cartridge_forge.plugins.cluster.manifests.volumes import model_volume
from cartridge_forge.plugins.cluster.spec import DeploymentSpec
from cartridge_forge.plugins.serve.spec import ServeSpec
from cartridge_forge.protocols.spec.mesh import MODEL_ROLES, RunSpec

TEACHERS = 8  # replicas of teacher_replay in overlays/teachers: they wait for providers
LAPTOP_CPU = "100m"  # requested a pod in overlays/cpu; the limit stays at its threads
POOL = "MonarchMesh"
CONTAINER = "/spec/podTemplate/spec/containers/0"
CLAIM_KIND = "PersistentVolumeClaim"
JOB_CONTAINER = "/spec/template/spec/containers/0"
JOB_START = "/spec/template/spec/initContainers/0"

Tree = dict[str, str]


def mesh_tree(
    spec: RunSpec,
    files: MeshFiles,
    size: ModelSize,
    rules: Mapping[str, Any],
    dashboard: str,
    values: DeploymentSpec,
) -> Tree:
    """Return base, components and overlays of a training mesh: text by path under deploy/k8s.
    Raises SpecError where the cluster's `values` do not hold the plan."""
    require_fit(spec, size, values.gpu)
    scope = scope_of(spec)

    def fit(objects: Sequence[Object]) -> list[Object]:
        return fitted(objects, values, scope)

    parts = {name: fit(objects) for name, objects in base(spec, files, size, values).items()}
    if values.gang and values.queue is not None:
        admitted_together(parts["pools.yaml"], scope.instance, values.queue)
    tree = _folder("base", parts)
    watched = fit(monitoring(scope, rules, dashboard))
    tree |= _folder("components/monitoring", {"monitoring.yaml": watched}, kind="Component")
    for name, rights in (("scaling", scaling(spec)), ("provisioning", provisioning(spec))):
        tree |= _folder(f"components/{name}", {"access.yaml": fit(rights)}, kind="Component")
    # A group of pods has one size, so nobody gets the right to change it.
    more = [] if values.gang else ["../../components/scaling"]
    tree |= _folder(
        "overlays/cpu",
        {},
        base=["../../base"],
        components=more,
        patches=cpu_patches(spec, values, parts),
    )
    more = ["../../components/monitoring", *more]
    tree |= _folder(
        "overlays/gpu",
        {},
        base=["../../base"],
        components=more,
        patches=gpu_patches(spec, values, parts),
    )
    # With an object store they are one: its replicas share a ledger on one file system.
    if "teacher_replay" in dict(spec.roles) and spec.mesh.records.store is None:
        more_of_them = _replace("/spec/replicas", TEACHERS)
        patches = [_patch(POOL, mesh_name("teacher_replay"), more_of_them)]
        if values.gang:
            replicas = sum(role.replicas for name, role in spec.roles if name != "teacher_replay")
            count = f"/spec/podTemplate/metadata/annotations/{_escaped(GROUP_COUNT)}"
            patches.append(_patch(POOL, None, _replace(count, str(replicas + TEACHERS))))
        tree |= _folder("overlays/teachers", {}, base=["../gpu"], patches=patches)
    return _headed(tree, files)


def monitoring(scope: Scope, rules: Mapping[str, Any], dashboard: str) -> list[Object]:
    """Return a run's PodMonitor, its recording and alert rules, and the dashboard for Grafana's
    sidecar. `rules` is the content of deploy/monitoring/rules.yml, `dashboard` the text of
    dashboard.json."""
    # The rules and the dashboard query the scrape job "forge"; the operator's default is the
    # namespace.
    job = {"targetLabel": "job", "replacement": "forge"}
    groups = {"groups": list(rules["groups"])}
    board = scope.made("v1", "ConfigMap", "forge-dashboard", data={"forge.json": dashboard})
    board["metadata"]["labels"]["grafana_dashboard"] = "1"
    return [
        scope.pod_monitor("forge", scope.of("controller").labels, "metrics", relabelings=[job]),
        scope.made(POD_MONITOR_API, "PrometheusRule", "forge", spec=groups),
        board,
    ]


def server_tree(
    spec: ServeSpec, files: MeshFiles, resources: Resources, values: DeploymentSpec
) -> Tree:
    """Return the server's overlays, with an image for CPUs, or for GPUs where the spec has any.
    Raises SpecError for a model that no pod would have."""
    require_server(values)
    scope = Scope(dashed(spec.name))
    model = model_volume(spec.model.path, values.model)
    parts = server(spec, files, resources, model)
    parts = {name: fitted(objects, values, scope) for name, objects in parts.items()}
    target = "cuda" if resources.gpus else "cpu"
    image = _replace(f"{JOB_CONTAINER}/image", image_of(values, target))
    tree = _folder("overlays/serve", parts, patches=[_patch("Deployment", "door", image)])
    image = _replace(
        "/spec/jobTemplate/spec/template/spec/containers/0/image", image_of(values, "cpu")
    )
    patches = [_patch("CronJob", "cartridges", image)]
    added = {
        name: fitted(objects, values, scope)
        for name, objects in runs(spec, files, resources, model).items()
    }
    tree |= _folder("overlays/serve-runs", added, base=["../serve"], patches=patches)
    return _headed(tree, files)


def cpu_patches(
    spec: RunSpec, values: DeploymentSpec, parts: Mapping[str, Sequence[Object]]
) -> list[Object]:
    """Return patches for a laptop: the CPU image, no GPU, and small CPU requests, so all pods fit.
    Storage is of one node, the only kind that kind and minikube have."""
    image = image_of(values, "cpu")
    little = _replace(f"{CONTAINER}/resources/requests/cpu", LAPTOP_CPU)
    ask_none = [
        {"op": "remove", "path": f"{CONTAINER}/resources/{kind}/{_escaped(GPU)}"}
        for kind in ("requests", "limits")
    ]
    one_node = (
        _replace("/spec/accessModes/0", "ReadWriteOnce"),
        _add("/metadata/annotations", {ONE_NODE: "true"}),
    )
    return [
        _patch(POOL, None, _replace(f"{CONTAINER}/image", image), little),
        *(_patch("PersistentVolumeClaim", name, *one_node) for name in _named(parts, CLAIM_KIND)),
        *(_patch(POOL, mesh_name(name), *ask_none) for name, role in spec.roles if role.gpus),
        *_job_patches(parts, image, little=LAPTOP_CPU),
    ]


def gpu_patches(
    spec: RunSpec, values: DeploymentSpec, parts: Mapping[str, Sequence[Object]]
) -> list[Object]:
    """Return patches for nodes with GPUs: a role with the model gets its spec's GPUs, at least
    one."""
    image = image_of(values, "cuda")
    patches = [_patch(POOL, None, _replace(f"{CONTAINER}/image", image))]
    for name, role in spec.roles:
        if name in MODEL_ROLES:
            gpus = str(role.procs * max(1, role.gpus))
            added = [
                _add(f"{CONTAINER}/resources/{kind}/{_escaped(GPU)}", gpus)
                for kind in ("requests", "limits")
            ]
            placed = on_gpu_nodes(values.gpu)
            added += [_add(f"/spec/podTemplate/spec/{key}", x) for key, x in placed.items()]
            added += _rdma(values, CONTAINER)
            patches.append(_patch(POOL, mesh_name(name), *added))
    if values.rdma is not None:  # the store is beside the controller
        placed = on_gpu_nodes(values.gpu)
        added = [_add(f"/spec/template/spec/{key}", x) for key, x in placed.items()]
        patches.append(_patch("Job", "controller", *added, *_rdma(values, JOB_CONTAINER)))
    return [*patches, *_job_patches(parts, image)]


def _rdma(values: DeploymentSpec, container: str) -> list[Object]:
    """Return the changes by which a container asks for the values' RDMA devices, none without."""
    if values.rdma is None:
        return []
    key, count = _escaped(values.rdma.resource), str(values.rdma.count)
    return [_add(f"{container}/resources/{k}/{key}", count) for k in ("requests", "limits")]


def _job_patches(
    parts: Mapping[str, Sequence[Object]], image: str, little: str | None = None
) -> list[Object]:
    """Return a patch for each Job: the image of its containers, and less of the CPU requested."""
    patches = []
    for name, job in _named(parts, "Job").items():
        changes = [_replace(f"{JOB_CONTAINER}/image", image)]
        if "initContainers" in job["spec"]["template"]["spec"]:
            changes.append(_replace(f"{JOB_START}/image", image))
        if little is not None:
            changes.append(_replace(f"{JOB_CONTAINER}/resources/requests/cpu", little))
        patches.append(_patch("Job", name, *changes))
    return patches


def _named(parts: Mapping[str, Sequence[Object]], kind: str) -> dict[str, Object]:
    """Return the objects of a kind by name."""
    every = [item for objects in parts.values() for item in objects]
    return {o["metadata"]["name"]: o for o in every if o["kind"] == kind}


def text(value: Any) -> str:
    """Return YAML in block style, with `|` for texts of several lines."""
    return yaml.dump(
        value, Dumper=ManifestDumper, sort_keys=False, default_flow_style=False, width=100
    )


def _patch(kind: str, name: str | None, *operations: Object) -> Object:
    """Return a patch for one object of a kind, or for all of them."""
    target = {"kind": kind} if name is None else {"kind": kind, "name": name}
    return {"target": target, "patch": text(list(operations))}


def _replace(path: str, value: Any) -> Object:
    return {"op": "replace", "path": path, "value": value}


def _add(path: str, value: Any) -> Object:
    return {"op": "add", "path": path, "value": value}


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _folder(
    folder: str,
    parts: Mapping[str, Sequence[Object]],
    *,
    kind: str = "Kustomization",
    base: Sequence[str] = (),
    components: Sequence[str] = (),
    patches: Sequence[Object] = (),
) -> Tree:
    """Return a folder's files, and the kustomization that lists them."""
    tree = {
        f"{folder}/{name}": "---\n".join(text(item) for item in objects)
        for name, objects in parts.items()
    }
    lists = {"resources": [*base, *parts], "components": components, "patches": patches}
    version = "v1alpha1" if kind == "Component" else "v1beta1"
    fields: Object = {"apiVersion": f"kustomize.config.k8s.io/{version}", "kind": kind}
    fields |= {name: list(entries) for name, entries in lists.items() if entries}
    return {**tree, f"{folder}/kustomization.yaml": text(fields)}


def _headed(tree: Tree, files: MeshFiles) -> Tree:
    sets = "".join(f" --set {value}" for value in files.sets)
    values = f" --values {files.values_name}" if files.values_name else ""
    head = f"# Rendered by: forge k8s render meshes/{files.mesh_name}{sets}{values}\n"
    return {path: head + body for path, body in tree.items()}


# libyaml's dumper writes the same, faster, where PyYAML was built with it.
_Base: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class ManifestDumper(_Base):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


ManifestDumper.add_representer(str, _string)
