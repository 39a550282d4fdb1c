"""Check objects against schemas: what the API server and the operators would refuse.

Built-in kinds: Kubernetes' own (the package kubernetes-validate, strict), with the constraints of
deploy.checks.constraints. Custom kinds: the definitions in deploy/checks/kinds and in the files
that are checked. Both packages come with the extra `kubernetes`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from deploy.checks.constraints import constrained, named, remedy_of
from deploy.checks.findings import Manifest, ManifestFault
from deploy.checks.kustomize import LOADER
from protocols.errors import SpecError

KUBERNETES = "1.32"
_FILES = f"kubernetes-json-schema/v{KUBERNETES}.0-local-strict"
_DEFINITIONS = "https://kubernetes.io/api/_definitions.json"
_GROUPS = frozenset(
    f"{name}.k8s.io"
    for name in (
        "admissionregistration", "apiextensions", "apiregistration", "authentication",
        "authorization", "certificates", "coordination", "discovery", "events",
        "flowcontrol.apiserver", "internal.apiserver", "networking", "node",
        "rbac.authorization", "resource", "scheduling", "storage", "storagemigration",
    )
)  # fmt: skip

Definition = Mapping[str, Any]


def definitions() -> list[Definition]:
    """Read the custom kinds' definitions that come with the package."""
    kinds = Path(__file__).parent / "kinds"
    return [yaml.load(path.read_bytes(), LOADER) for path in sorted(kinds.glob("*.yaml"))]


def is_built_in(found: Manifest) -> bool:
    return "." not in found.group or found.group in _GROUPS


def built_in(manifests: Sequence[Manifest]) -> Iterator[ManifestFault]:
    """Yield faults of the built-in kinds, and of the pod templates inside MonarchMeshes. A kind
    without a schema, such as an apiVersion of long ago, is a fault."""
    for found in manifests:
        if is_built_in(found):
            for path, what, remedy in _checked(json.dumps(found.value)):
                yield found.finding("schema", path, what, remedy)
        elif found.kind == "MonarchMesh":
            template = found.spec.get("podTemplate") if isinstance(found.spec, dict) else None
            if isinstance(template, dict):
                metadata = {"name": found.name}
                inner = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata}
                for path, what, remedy in _checked(json.dumps({**inner, "template": template})):
                    place = path.replace(".template", ".spec.podTemplate", 1)
                    yield found.finding("schema", place, what, remedy)


def custom(
    manifests: Sequence[Manifest], kinds: Sequence[Definition]
) -> tuple[list[ManifestFault], list[str]]:
    """Return faults of the custom kinds, and a note for each kind that no definition knows."""
    from jsonschema import Draft202012Validator

    known = {
        (f"{d['spec']['group']}/{version['name']}", d["spec"]["names"]["kind"]): version["schema"][
            "openAPIV3Schema"
        ]
        for d in kinds
        for version in d["spec"]["versions"]
        if "schema" in version
    }
    groups = {(d["spec"]["group"], d["spec"]["names"]["kind"]) for d in kinds}
    faults: list[ManifestFault] = []
    unknown: dict[str, None] = {}
    for found in manifests:
        if is_built_in(found):
            continue
        version = str(found.value["apiVersion"])
        schema = known.get((version, found.kind))
        if schema is None and (found.group, found.kind) in groups:
            have = sorted(v for v, kind in known if kind == found.kind)
            what = f"{found.kind} has no version {version}"
            faults.append(
                found.finding("custom", ".apiVersion", what, f"write {' or '.join(have)}")
            )
        elif schema is None:
            unknown[f"{found.kind} of {version}"] = None
        else:
            errors = Draft202012Validator(schema).iter_errors(found.value)
            faults += [found.finding("custom", *parts) for parts in _parts(errors)]
    return faults, [f"{kind}: no definition of it here, passed over" for kind in unknown]


def defined_in(manifests: Iterable[Manifest]) -> list[Definition]:
    """Return the definitions of custom kinds among the objects."""
    return [m.value for m in manifests if m.kind == "CustomResourceDefinition"]


@cache
def _checked(text: str) -> tuple[tuple[str, str, str], ...]:
    """Return (path, what, remedy) of each fault. Overlays share most objects: each is put to its
    schema once."""
    value = json.loads(text)
    validator = _validator(str(value["kind"]), str(value["apiVersion"]))
    if validator is None:
        what = f"Kubernetes {KUBERNETES} has no {value['kind']} of {value['apiVersion']}"
        return ((".apiVersion", what, "write a version that it has (kubectl api-resources)"),)
    return tuple(_parts(validator.iter_errors(value)))


@cache
def _validator(kind: str, version: str) -> Any:
    """Return the validator of a built-in kind; None where there is none such."""
    from jsonschema import Draft202012Validator
    from referencing import Registry, Resource

    group, _, number = version.rpartition("/")
    prefix = f"{group.partition('.')[0]}-" if group else ""
    path = _packaged(f"{_FILES}/{kind.lower()}-{prefix}{number}.json")
    if not path.is_file():
        return None
    own = json.loads(path.read_bytes())
    # The schema of a kind refers to the definitions; its metadata's name depends on the kind.
    own["properties"]["metadata"] = {
        "allOf": [own["properties"]["metadata"], {"properties": {"name": named(kind)}}],
    }
    return Draft202012Validator(
        own, registry=Registry().with_resource(_DEFINITIONS, _shared(Resource))
    )


@cache
def _shared(resource: Any) -> Any:
    contents = json.loads(_packaged(f"{_FILES}/_definitions.json").read_bytes())
    return resource.from_contents({**contents, "$defs": constrained(contents["$defs"])})


@cache
def _packaged(name: str) -> Path:
    try:
        import kubernetes_validate
    except ImportError as error:
        raise SpecError(
            "manifests are checked with Kubernetes' schemas, which are not installed; "
            "pip install 'cartridge-forge[kubernetes]'"
        ) from error
    return Path(kubernetes_validate.__file__).parent / name


def _parts(errors: Iterable[Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (path, what, remedy) of jsonschema's errors, each place once."""
    seen = set()
    for error in sorted(errors, key=lambda e: [str(part) for part in e.absolute_path]):
        path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error.absolute_path)
        if path not in seen:
            seen.add(path)
            yield (
                path,
                _what(error),
                remedy_of(error.schema, error.validator, error.validator_value),
            )


def _what(error: Any) -> str:
    got = f"{json.dumps(error.instance, default=str):.80}"
    if error.validator == "pattern":
        return f"{got} is not of the form that the API server takes"
    if error.validator == "type":
        return f"{got} is of the wrong type"
    if error.validator == "enum":
        return f"{got} is not a value that it has"
    return f"{error.message:.160}"
