"""What the API server and the operators would refuse, asked of their schemas.

Built-in kinds: kubernetes-validate, strictly. Custom kinds: the schemas of deploy/k8s/crds. Both
packages are of the `dev` extra.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from deploy.manifests.objects import Object
from manifest_checks.kustomize import name_of

KUBERNETES = "1.32"


def built_in(objects: Sequence[Object]) -> list[str]:
    """Faults of the built-in kinds, and of the pod templates inside MonarchMeshes. A kind that has
    no schema, such as an apiVersion of long ago, is a fault and no warning."""
    faults = []
    for found in objects:
        template = found.get("spec", {}).get("podTemplate") if isinstance(found, dict) else None
        if "." not in found["apiVersion"].partition("/")[0] or _of_kubernetes(found):
            faults += _strictly(found, name_of(found))
        elif found["kind"] == "MonarchMesh" and isinstance(template, dict):
            metadata = {"name": found["metadata"]["name"]}
            inner = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata}
            faults += _strictly({**inner, "template": template}, f"{name_of(found)} podTemplate")
    return faults


def custom(objects: Sequence[Object], definitions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Faults of the custom kinds. One that no definition knows is a fault."""
    from jsonschema import Draft202012Validator

    known = {
        (f"{d['spec']['group']}/{version['name']}", d["spec"]["names"]["kind"]): version["schema"][
            "openAPIV3Schema"
        ]
        for d in definitions
        for version in d["spec"]["versions"]
    }
    faults = []
    for found in objects:
        if "." not in found["apiVersion"].partition("/")[0] or _of_kubernetes(found):
            continue
        schema = known.get((found["apiVersion"], found["kind"]))
        if schema is None:
            faults.append(f"{name_of(found)}: {found['apiVersion']} is defined in no file of crds")
            continue
        for error in Draft202012Validator(schema).iter_errors(found):
            faults.append(f"{name_of(found)}: {error.json_path}: {error.message:.200}")
    return faults


def _of_kubernetes(found: Object) -> bool:
    return bool(found["apiVersion"].partition("/")[0].endswith(".k8s.io"))


def _strictly(found: Object, name: str) -> list[str]:
    """Faults of one object. Overlays share most of theirs: each is put to its schema once."""
    return [f"{name}: {fault}" for fault in _checked(json.dumps(found))]


@cache
def _checked(text: str) -> tuple[str, ...]:
    import kubernetes_validate as validate

    _read_once()
    try:
        validate.validate(json.loads(text), KUBERNETES, strict=True)
    except validate.ValidationError as error:
        path = ".".join(str(part) for part in error.path)
        return (f"{path}: {error.message:.200}",)
    except validate.SchemaNotFoundError as error:
        return (str(error.message),)
    return ()


@cache
def _read_once() -> None:
    """The package reads its 1 MB of definitions anew for every object: let it keep them."""
    from kubernetes_validate import utils

    utils.schema_contents = cache(utils.schema_contents)
