"""Read the manifests of files and folders: each kustomization that may be applied is built, and all
other files are one set."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from deploy.checks.findings import Manifest, ManifestFault
from deploy.checks.kustomize import FILES, LOADER, built, files_of, targets
from protocols.errors import SpecError

STANDARD_INPUT = "-"
ENDINGS = (".yaml", ".yml", ".json")
MOST_VALUES = 100_000  # of one text, aliases written out


@dataclass(frozen=True)
class ManifestSet:
    """Hold objects that are applied together; `name` is a kustomization's folder, or ""."""

    name: str
    manifests: tuple[Manifest, ...]


def read_sets(paths: Sequence[str]) -> tuple[list[ManifestSet], list[ManifestFault], list[str]]:
    """Return what files, folders or `-` hold, what is no object of the API, and notes of what was
    passed over. Raises SpecError for a path that is not there or holds nothing."""
    sets: list[ManifestSet] = []
    faults: list[ManifestFault] = []
    notes: list[str] = []
    loose: list[Manifest] = []
    for path in paths:
        tree = _tree(path, notes)
        for target in targets(tree):
            try:
                sets.append(ManifestSet(target, tuple(_valid(built(tree, target), faults))))
            except SpecError as error:
                what, _, remedy = str(error).rpartition("; ")
                faults.append(ManifestFault("build", "", "", what, remedy, target))
        own = files_of(tree)
        for name, text in tree.items():
            if name not in own and Path(name).name not in FILES:
                loose += _valid(_parsed(name, text, faults), faults)
            elif name in own:
                faults += _duplicates(name, text)
    if loose:
        sets.append(ManifestSet("", tuple(loose)))
    if not sets and not faults:
        raise SpecError(f"{', '.join(paths)}: there are no manifests; give YAML files or a folder")
    return sets, _once(faults), notes


def _once(faults: Sequence[ManifestFault]) -> list[ManifestFault]:
    return list(dict.fromkeys(faults))


def _tree(path: str, notes: list[str]) -> dict[str, str]:
    top = Path(path)
    if path == STANDARD_INPUT or top.is_file():
        name = "standard input" if path == STANDARD_INPUT else path
        text = sys.stdin.read() if path == STANDARD_INPUT else top.read_text(encoding="utf-8")
        _require_finite(name, text)
        return {name: text}
    if not top.is_dir():
        raise SpecError(
            f"there is nothing at {path}; give a file, a folder, or - for standard input"
        )
    tree = {}
    charts = [chart.parent for chart in sorted(top.rglob("Chart.yaml"))]
    for chart in charts:
        notes.append(
            f"{chart}: a Helm chart, passed over; check what it makes: "
            f"helm template {chart} | forge k8s check -"
        )
    for found in sorted(top.rglob("*")):
        if any(chart in found.parents for chart in charts) or not found.is_file():
            continue
        if found.suffix in ENDINGS or found.name in FILES:
            tree[str(found)] = text = found.read_text(encoding="utf-8")
            _require_finite(str(found), text)
    return tree


def _require_finite(name: str, text: str) -> None:
    """Raise SpecError for a text whose aliases stand for more than MOST_VALUES values, or for what
    they are in: a walk over it would not end."""
    if "&" not in text or "*" not in text:
        return
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = MOST_VALUES + 1  # if it is found within itself
            inner = node.value if isinstance(node, yaml.CollectionNode) else ()
            inner = chain.from_iterable(inner) if isinstance(node, yaml.MappingNode) else inner
            sizes[id(node)] = 1 + sum(map(size, inner))
        return sizes[id(node)]

    try:
        whole = sum(map(size, list(yaml.compose_all(text, LOADER))))
    except (yaml.YAMLError, RecursionError):
        return  # told by whoever reads it
    if whole > MOST_VALUES:
        raise SpecError(
            f"{name}: its aliases stand for more than {MOST_VALUES:,} values; write them out"
        )


def _parsed(name: str, text: str, faults: list[ManifestFault]) -> list[Manifest]:
    faults += _duplicates(name, text)
    try:
        values = [value for value in yaml.load_all(text, LOADER) if value is not None]
    except yaml.YAMLError as error:
        if "{{" in text:
            what, remedy = (
                "is a template",
                "check what it makes: helm template ... | forge k8s check -",
            )
        else:
            what, remedy = f"is no YAML ({' '.join(str(error).split()):.160})", "correct it"
        faults.append(ManifestFault("schema", "", "", what, remedy, name))
        return []
    return [Manifest(value, name) for value in values]


def _valid(manifests: Sequence[Manifest], faults: list[ManifestFault]) -> Iterator[Manifest]:
    """Yield the objects, those of a List one by one. What is no object is a fault."""
    for found in manifests:
        value: Any = found.value
        if not isinstance(value, Mapping):
            faults.append(
                ManifestFault(
                    "schema",
                    "",
                    "",
                    f"{str(value)[:60]!r} is no object",
                    "give apiVersion, kind and metadata",
                    found.file,
                )
            )
            continue
        if str(value.get("kind")).endswith("List") and isinstance(value.get("items"), list):
            yield from _valid([Manifest(v, found.file) for v in value["items"]], faults)
            continue
        metadata = value.get("metadata")
        for key, good in (
            ("apiVersion", isinstance(value.get("apiVersion"), str)),
            ("kind", isinstance(value.get("kind"), str)),
            ("metadata", isinstance(metadata, Mapping)
             and bool(metadata.get("name") or metadata.get("generateName"))),
        ):  # fmt: skip
            if not good:
                name = f"{value.get('kind') or 'an object'}"
                what = "has no metadata.name" if key == "metadata" else f"has no {key}"
                faults.append(ManifestFault("schema", name, f".{key}", what, "add it", found.file))
                break
        else:
            yield found


def _duplicates(name: str, text: str) -> list[ManifestFault]:
    """Return keys that a mapping has twice: the last wins without a word, kubectl refuses them."""
    try:
        nodes = list(yaml.compose_all(text, LOADER))
    except yaml.YAMLError:
        return []
    faults: list[ManifestFault] = []
    waiting: list[Any] = [node for node in nodes if node is not None]
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, value in node.value:
                waiting.append(value)
                if not isinstance(key, yaml.ScalarNode):
                    continue
                if key.value in seen and key.value != "<<":
                    line = key.start_mark.line + 1
                    faults.append(
                        ManifestFault(
                            "schema",
                            "",
                            "",
                            f"line {line} has key {key.value} again",
                            "keep one",
                            name,
                        )
                    )
                seen.add(key.value)
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
    return faults
