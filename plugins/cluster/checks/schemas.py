"""Validate objects against the schemas of their kinds: Kubernetes' own, strictly (the package
kubernetes-validate, in the extra `kubernetes`), and the custom kinds' definitions in
plugins/cluster/checks/kinds and in the files themselves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from cartridge_forge.plugins.cluster.checks.findings import Manifest, ManifestFault
from cartridge_forge.plugins.cluster.manifests.overlays import LOADER
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.packages import extra_command

RULE = "schema"
KUBERNETES = "1.32"
Definition = Mapping[str, Any]


def definitions() -> list[Definition]:
    """Read the custom kinds' definitions that come with the package."""
    kinds = Path(__file__).parent / "kinds"
    return [yaml.load(path.read_bytes(), LOADER) for path in sorted(kinds.glob("*.yaml"))]


def check_schemas(
    manifests: Sequence[Manifest], kinds: Sequence[Definition]
) -> tuple[list[ManifestFault], list[str]]:
    """Return the faults of each object, and a note for each kind without a schema. The pod template
    of a MonarchMesh is validated as a PodTemplate."""
    from jsonschema import Draft202012Validator

    custom = {
        (f"{kind['spec']['group']}/{version['name']}", kind["spec"]["names"]["kind"]): version
        for kind in kinds
        for version in kind["spec"]["versions"]
    }
    faults: list[ManifestFault] = []
    notes: dict[str, None] = {}
    for manifest in manifests:
        version, kind = str(manifest.value["apiVersion"]), manifest.kind
        if (version, kind) in custom:
            schema = custom[version, kind].get("schema", {}).get("openAPIV3Schema", {})
            faults += _faults(manifest, Draft202012Validator(schema), manifest.value)
            if kind == "MonarchMesh":
                pod = {"apiVersion": "v1", "kind": "PodTemplate",
                       "template": manifest.spec.get("podTemplate")}  # fmt: skip
                faults += _faults(manifest, _validator("PodTemplate", "v1"), pod)
        elif validator := _validator(kind, version):
            faults += _faults(manifest, validator, manifest.value)
        elif versions := _versions(kind, manifest.group, custom):
            versions_text = ", ".join(sorted(versions))
            faults.append(
                manifest.finding(RULE, ".apiVersion", f"has no {version}", f"write {versions_text}")
            )
        else:
            notes[f"{kind} of {version}: no schema of it here, not validated"] = None
    return faults, list(notes)


def _faults(manifest: Manifest, validator: Any, value: Any) -> Iterator[ManifestFault]:
    for error in sorted(validator.iter_errors(value), key=lambda e: str(list(e.absolute_path))):
        path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error.absolute_path)
        if value is not manifest.value:
            path = path.replace(".template", ".spec.podTemplate", 1)
        yield manifest.finding(RULE, path, f"{error.message:.160}", "correct it")


def _versions(kind: str, group: str, custom: Iterable[tuple[str, str]]) -> list[str]:
    """Return the versions of a kind that have a schema here."""
    files = _schemas().glob(f"{kind.lower()}-{group.partition('.')[0]}{'-' * bool(group)}v*.json")
    versions = [f"{group}/{path.stem.rpartition('-')[2]}".lstrip("/") for path in files]
    return versions + [v for v, k in custom if (v.rpartition("/")[0], k) == (group, kind)]


@cache
def _validator(kind: str, version: str) -> Any:
    """Return the validator of a built-in kind; None where Kubernetes has none such."""
    from jsonschema import Draft202012Validator
    from referencing import Registry, Resource

    group, _, number = version.rpartition("/")
    prefix = f"{group.partition('.')[0]}-" if group else ""
    path = _schemas() / f"{kind.lower()}-{prefix}{number}.json"
    if not path.is_file() or ("." in group and not group.endswith(".k8s.io")):
        return None
    shared = Resource.from_contents(json.loads((_schemas() / "_definitions.json").read_bytes()))
    return Draft202012Validator(json.loads(path.read_bytes()), registry=shared @ Registry())


def _schemas() -> Path:
    try:
        import kubernetes_validate
    except ImportError as error:
        raise SpecError(
            "manifests are checked with Kubernetes' schemas, which are not installed; run "
            f"`{extra_command('kubernetes')}`"
        ) from error
    schemas = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    return schemas / f"v{KUBERNETES}.0-local-strict"
