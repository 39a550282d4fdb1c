"""Read the manifests of files and folders: each kustomization of `forge k8s render` is built, and
all other files are one set."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from cartridge_forge.plugins.cluster.checks.findings import Manifest, ManifestFault
from cartridge_forge.plugins.cluster.manifests.overlays import LOADER, build, files_of, targets
from cartridge_forge.protocols.errors import SpecError

STANDARD_INPUT = "-"
ENDINGS = (".yaml", ".yml", ".json")
OTHER_KUSTOMIZATIONS = ("kustomization.yml", "Kustomization")


def read_sets(
    paths: Sequence[str],
) -> tuple[list[list[Manifest]], list[Manifest], list[ManifestFault], list[str]]:
    """Return the objects of files, folders or `-`: a list for each kustomization, then those of
    files that are in none; faults of what is no object; and notes of what is not read. Raises
    SpecError for a path that does not exist or holds nothing."""
    sets: list[list[Manifest]] = []
    faults: list[ManifestFault] = []
    notes: list[str] = []
    loose: list[Manifest] = []
    for path in paths:
        tree = _tree(path, faults, notes)
        for target in targets(tree):
            try:
                sets.append(list(_valid(build(tree, target), target, faults)))
            except SpecError as error:
                what, _, remedy = str(error).rpartition("; ")
                faults.append(ManifestFault("build", "", "", what, remedy, target))
        for name in tree.keys() - files_of(tree):
            loose += _valid(yaml.load_all(tree[name], LOADER), name, faults)
    if not sets and not loose and not faults:
        raise SpecError(f"{', '.join(paths)}: there are no manifests; give YAML files or a folder")
    return sets, sorted(loose, key=lambda manifest: manifest.file), faults, notes


def _tree(path: str, faults: list[ManifestFault], notes: list[str]) -> dict[str, str]:
    """Return the texts that are YAML, by path."""
    top, files = Path(path), {}
    if path == STANDARD_INPUT:
        files["standard input"] = sys.stdin.read()
    elif top.is_file():
        files[path] = top.read_text(encoding="utf-8")
    elif top.is_dir():
        charts = [chart.parent for chart in sorted(top.rglob("Chart.yaml"))]
        notes += [
            f"{chart}: a Helm chart, not read; check what it makes: "
            f"helm template {chart} | forge k8s check -"
            for chart in charts
        ]
        for file in sorted(top.rglob("*")):
            if file.name in OTHER_KUSTOMIZATIONS:
                folder = file.parent
                notes.append(f"{file}: not read; kubectl kustomize {folder} | forge k8s check -")
            elif file.suffix in ENDINGS and not any(c in file.parents for c in charts):
                files[str(file)] = file.read_text(encoding="utf-8")
    else:
        raise SpecError(
            f"there is nothing at {path}; give a file, a folder, or - for standard input"
        )
    return {name: text for name, text in files.items() if not _fault(name, text, faults)}


def _fault(name: str, text: str, faults: list[ManifestFault]) -> bool:
    """Append the fault of a text that is no YAML, or has aliases: some stand for no finite text."""
    try:
        aliases = [e for e in yaml.parse(text, LOADER) if isinstance(e, yaml.AliasEvent)]
        if not aliases:
            list(yaml.load_all(text, LOADER))
            return False
        problem = (f"uses the alias *{aliases[0].anchor}", "write the value out")
    except yaml.YAMLError as error:
        problem = (f"is no YAML ({' '.join(str(error).split()):.160})", "correct it")
        if "{{" in text:
            problem = (
                "is a template",
                "check what it makes: helm template ... | forge k8s check -",
            )
    faults.append(ManifestFault("schema", "", "", *problem, name))
    return True


def _valid(values: Any, file: str, faults: list[ManifestFault]) -> Iterator[Manifest]:
    """Yield the objects, those of a List one by one. What is no object is a fault."""
    for value in values:
        if value is None:
            continue
        if not isinstance(value, dict):
            what = f"{str(value)[:60]!r} is no object"
            remedy = "give apiVersion, kind and metadata"
            faults.append(ManifestFault("schema", "", "", what, remedy, file))
        elif str(value.get("kind")).endswith("List") and isinstance(value.get("items"), list):
            yield from _valid(value["items"], file, faults)
        else:
            metadata = value.get("metadata")
            fields = {
                "apiVersion": isinstance(value.get("apiVersion"), str),
                "kind": isinstance(value.get("kind"), str),
                "metadata.name": isinstance(metadata, dict)
                and bool(metadata.get("name") or metadata.get("generateName")),
            }
            missing = [name for name, value in fields.items() if not value]
            kind = str(value.get("kind") or "an object")
            faults += [
                ManifestFault("schema", kind, f".{name}", f"has no {name}", "add it", file)
                for name in missing
            ]
            if not missing:
                yield Manifest(value, file)
