"""What `forge k8s render` writes for a cluster's values, and what `forge k8s check` finds in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cartridge_forge.forge_run.cli import parsed_elsewhere
from cartridge_forge.plugins.cluster.checks.check import check_objects
from cartridge_forge.plugins.cluster.checks.findings import Manifest
from cartridge_forge.plugins.cluster.manifests.overlays import build


def values(folder: Path, **given: Any) -> Path:
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(given), encoding="utf-8")
    return path


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return {o["metadata"]["name"]: o for o in objects if o["kind"] == kind}


def pods(objects: list[dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for value in objects:
        spec = value.get("spec") or {}
        spec = spec.get("jobTemplate", {}).get("spec", spec)
        template = spec.get("podTemplate") or spec.get("template")
        if isinstance(template, dict):
            found[value["metadata"]["name"]] = template["spec"]
    return found


def findings(tree: dict[str, str], target: str) -> list[str]:
    manifests = [Manifest(value) for value in build(tree, target)]
    return [str(fault) for fault in check_objects(manifests, parsed_elsewhere)[0]]
