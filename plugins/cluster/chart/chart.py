"""Write a Helm chart of a mesh or of a server: the objects of `forge k8s render`, fitted to the
values by Helm instead of by us.

Chart.yaml            values.yaml           deploy/values.yaml, and which overlay
values.schema.json    the keys, and what the plan needs: less is refused with the figure
objects/*.yaml        the objects for the default values, by the overlays that have them
facts.yaml            names that the template needs
templates/            one template for all objects, and the notes
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from posixpath import basename

from cartridge_forge.plugins.cluster.manifests.devices import (
    GB,
    GROUP,
    GROUP_COUNT,
    GROUP_ROLE,
    GROUP_SERVES,
    QUEUE,
    process_bytes,
)
from cartridge_forge.plugins.cluster.manifests.kustomization import Tree, text
from cartridge_forge.plugins.cluster.manifests.mesh import CONTROL_KEYS, CONTROL_SECRET, PEM_KEYS
from cartridge_forge.plugins.cluster.manifests.objects import DOMAIN, GPU, IMAGE, SECRETS, Object
from cartridge_forge.plugins.cluster.manifests.overlays import build, targets
from cartridge_forge.plugins.cluster.manifests.sizing import GIB, ModelSize, runs_bytes
from cartridge_forge.plugins.cluster.manifests.values import KEDA_API
from cartridge_forge.plugins.cluster.manifests.volumes import MOUNT, TOKEN
from cartridge_forge.plugins.cluster.spec import DeploymentSpec
from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.protocols.spec.mesh import MODEL_ROLES, RunSpec

PARTS = Path(__file__).parent / "templates"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
OUT_OF_THE_CLAIM = r"^/|(^|/)\.\.(/|$)"


@dataclass(frozen=True)
class Needs:
    """Hold the plan's least values: memory of one GPU in GB, and the claim of runs in GiB; 0 where
    nothing is asked. And whether it is a mesh."""

    gpu_gb: float = 0.0
    runs_gib: int = 0
    is_mesh: bool = False


def least_needs(spec: RunSpec, size: ModelSize) -> Needs:
    """Return what the values must give a mesh, as `render` refuses less."""
    models = [name for name, _ in spec.roles if name in MODEL_ROLES]
    most = max((process_bytes(spec, name, size) / GB for name in models), default=0.0)
    return Needs(most, -(-runs_bytes(RsaLearn.of(spec.learn), size) // GIB), is_mesh=True)


def chart_tree(tree: Tree, name: str, version: str, least: Needs, command: str) -> Tree:
    """Return the chart of a rendered tree (of the default values): texts by path. `command` made
    it, for its first line."""
    overlays = {basename(target): build(tree, target) for target in targets(tree)}
    defaults = DeploymentSpec().model_dump(mode="json")
    first = "gpu" if "gpu" in overlays else next(iter(overlays))
    chart = {
        "apiVersion": "v2",
        "name": name,
        "description": f"Cartridge Forge: {name}",
        "type": "application",
        "version": version,
        "appVersion": version,
        "kubeVersion": ">=1.30.0-0",
    }
    values = {"overlay": first, **defaults}
    head = f"# Written by: {command}\n"
    files = {
        "Chart.yaml": head + text(chart),
        "values.yaml": head + text(values),
        "values.schema.json": json.dumps(schema(list(overlays), first, least), indent=2) + "\n",
        "facts.yaml": head + text(_facts(overlays, least)),
    }
    files |= {
        f"objects/{digest}.yaml": text(shared) for digest, shared in _shared(overlays).items()
    }
    parts = {f"templates/{part.name}": part.read_text("utf-8") for part in sorted(PARTS.iterdir())}
    return files | parts


def schema(overlays: Sequence[str], first: str, least: Needs) -> Object:
    """Return the JSON Schema of the chart's values: the keys of `--values`, the rules between them,
    and the plan's least figures."""
    document: Object = {"$schema": DIALECT, **DeploymentSpec.model_json_schema()}
    overlay = {
        "enum": list(overlays),
        "default": first,
        "description": "which of the overlays of `forge k8s render`",
    }
    document["properties"] = {"overlay": overlay, **document["properties"]}
    # Helm itself adds the key for charts that are part of others.
    document["properties"]["global"] = {"type": "object"}
    document["required"] = ["overlay"]
    parts = document["$defs"]
    image = parts["ImageSpec"]["properties"]
    image["tag"]["not"] = {"const": "latest"}
    # Of keys with a pattern pydantic says what those that match hold, and nothing of the others.
    parts["GpuClassSpec"]["properties"]["node_labels"]["additionalProperties"] = False
    model = parts["ModelSourceSpec"]
    model["properties"]["path"]["anyOf"][0]["not"] = {"pattern": OUT_OF_THE_CLAIM}
    fields = {key: {"type": "string"} for key in ("claim", "path")}
    neither = {key: {"type": "null"} for key in ("claim", "path")}
    model["anyOf"] = [{"required": list(fields), "properties": fields}, {"properties": neither}]
    tolerated = parts["TolerationSpec"]
    equal = {"properties": {"operator": {"const": "Equal"}}, "required": ["operator"]}
    tolerated["if"], tolerated["then"], tolerated["else"] = (
        equal,
        {"required": ["value"], "properties": {"value": {"type": "string"}}},
        {"properties": {"value": {"type": "null"}}},
    )
    keys = document["properties"]
    if not least.is_mesh:
        keys["gang"]["const"] = False
        keys["rdma"] = {"type": "null", "description": keys["rdma"]["description"]}
    queued = {"properties": {"queue": {"type": "string"}}, "required": ["queue"]}
    document["if"], document["then"] = (
        {"properties": {"gang": {"const": True}}, "required": ["gang"]},
        queued,
    )
    if least.gpu_gb:
        parts["GpuClassSpec"]["properties"]["gb"]["minimum"] = round(least.gpu_gb, 3)
    if least.runs_gib:
        parts["StorageSpec"]["properties"]["runs_gib"]["anyOf"][0]["minimum"] = least.runs_gib
    return document


def _facts(overlays: Mapping[str, Sequence[Object]], least: Needs) -> Object:
    every = [item for objects in overlays.values() for item in objects]
    (space,) = {o["metadata"]["name"]: o for o in every if o["kind"] == "Namespace"}.values()
    return {
        "namespace": space["metadata"]["name"],
        "image": IMAGE,
        "componentKey": f"{DOMAIN}/component",
        "secretsKey": SECRETS,
        "secrets": space["metadata"].get("annotations", {}).get(SECRETS, "none"),
        "controlSecret": CONTROL_SECRET,
        "controlKeys": f"{CONTROL_SECRET}: {' '.join(CONTROL_KEYS)}",
        "pemKeys": " ".join(PEM_KEYS),
        "queueKey": QUEUE,
        "group": space["metadata"]["labels"][f"{DOMAIN}/instance"],
        "groupKey": GROUP,
        "groupCountKey": GROUP_COUNT,
        "groupRoleKey": GROUP_ROLE,
        "groupServesKey": GROUP_SERVES,
        "productKey": f"{GPU}.product",
        "kedaApi": KEDA_API,
        "hubToken": TOKEN,
        "modelMount": MOUNT,
        "plannedRuns": bool(least.runs_gib),
    }


def _shared(overlays: Mapping[str, Sequence[Object]]) -> dict[str, list[Object]]:
    """Return each object once, under the names of the overlays that have it: `cpu+gpu`."""
    copies: dict[str, tuple[Object, list[str]]] = {}
    for name, objects in overlays.items():
        for one in objects:
            copies.setdefault(json.dumps(one, sort_keys=True), (one, []))[1].append(name)
    shared: dict[str, list[Object]] = {}
    for one, names in copies.values():
        shared.setdefault("+".join(names), []).append(one)
    return shared
