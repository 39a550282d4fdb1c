"""Build the kustomizations that `forge k8s render` writes: resources, components, and JSON patches
(RFC 6902). `kubectl kustomize` builds all others."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from posixpath import dirname, join, normpath
from typing import Any

import yaml

from cartridge_forge.plugins.cluster.manifests.objects import Object
from cartridge_forge.protocols.errors import SpecError

NAME = "kustomization.yaml"
KEYS = {"apiVersion", "kind", "resources", "components", "patches"}
# libyaml's where PyYAML was built with it: it reads the manifests ten times faster.
LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def build(tree: Mapping[str, str], target: str) -> list[Object]:
    """Return the objects of one kustomization of a tree of texts by path: `build(tree,
    "overlays/gpu")`. Raises SpecError, also for a patch that matches no object."""
    objects: list[Object] = []
    _include(tree, normpath(target), objects)
    return objects


def targets(tree: Mapping[str, str]) -> list[str]:
    """Return the folders that may be applied: kustomizations that are no part of another one, and
    every one in a folder `overlays`."""
    parts, folders = set(), []
    for path, values in _kustomizations(tree):
        if values.get("kind", "Kustomization") == "Kustomization":
            folders.append(dirname(path))
            names = [*values.get("resources", ()), *values.get("components", ())]
            parts |= {normpath(join(dirname(path), name)) for name in names}
    return sorted(f for f in folders if f not in parts or "overlays" in f.split("/"))


def files_of(tree: Mapping[str, str]) -> set[str]:
    """Return every path that a kustomization of the tree names, and the kustomizations."""
    paths = set()
    for path, values in _kustomizations(tree):
        paths.add(path)
        names = [*(values.get("resources") or ()), *(values.get("components") or ())]
        names += [patch["path"] for patch in values.get("patches") or () if "path" in patch]
        paths |= {normpath(join(dirname(path), str(name))) for name in names}
    return paths


def _kustomizations(tree: Mapping[str, str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for path, text in tree.items():
        if path.rpartition("/")[2] == NAME:
            values = _load(text, path)
            yield path, values if isinstance(values, dict) else {}


def _load(text: str, path: str) -> Any:
    try:
        return yaml.load(text, LOADER)
    except yaml.YAMLError as error:
        raise SpecError(
            f"{path}: is no YAML ({' '.join(str(error).split())}); correct it"
        ) from error


def _include(tree: Mapping[str, str], folder: str, objects: list[Object]) -> None:
    path = join(folder, NAME)
    if path not in tree:
        raise SpecError(f"{folder}: has no {NAME}; correct the path that names it")
    values = _load(tree[path], path)
    if unknown := set(values) - KEYS:
        raise SpecError(
            f"{path}: {min(unknown)} is not read here; check what it builds: "
            f"kubectl kustomize {folder} | forge k8s check -"
        )
    included: list[Object] = []
    for name in values.get("resources") or ():
        inner = normpath(join(folder, name))
        if inner in tree:
            included += [v for v in yaml.load_all(tree[inner], LOADER) if v is not None]
        else:
            _include(tree, inner, included)
    # A component patches what its kustomization has gathered so far.
    for name in values.get("components") or ():
        _include(tree, normpath(join(folder, name)), included)
    if values.get("kind") == "Component":
        objects += included
        included = objects
    for patch in values.get("patches") or ():
        _patch(path, folder, patch, included)
    if included is not objects:
        objects += included


def _patch(path: str, folder: str, patch: Mapping[str, Any], objects: list[Object]) -> None:
    operations, target = _load(patch.get("patch") or "", path), patch.get("target") or {}
    if not isinstance(operations, list) or not target:
        raise SpecError(
            f"{path}: a patch is no list of operations with a target; check what it builds: "
            f"kubectl kustomize {folder} | forge k8s check -"
        )
    matches = [
        o
        for o in objects
        if target.get("kind", o["kind"]) == o["kind"]
        and target.get("name", o["metadata"]["name"]) == o["metadata"]["name"]
    ]
    if not matches:
        raise SpecError(f"{path}: a patch meets no object: {target}; remove it")
    for value in matches:
        for operation in operations:
            apply(value, operation, path)


def apply(value: Object, operation: Mapping[str, Any], path: str) -> None:
    """Apply one operation of RFC 6902 (add, replace, remove) in place. Raises SpecError."""
    pointer = operation["path"]
    *parents, last = (p.replace("~1", "/").replace("~0", "~") for p in pointer.split("/")[1:])
    node: Any = value
    for key in parents:
        try:
            node = node[int(key) if isinstance(node, list) else key]
        except (KeyError, IndexError, TypeError, ValueError):
            raise SpecError(f"{path}: {pointer}: there is no {key}; correct the path") from None
    index: Any = len(node) if last == "-" else int(last) if isinstance(node, list) else last
    present = index in node if isinstance(node, dict) else index < len(node)
    if operation["op"] not in ("add", "replace", "remove"):
        raise SpecError(f"{path}: {operation['op']} is not read here; use add, replace or remove")
    if operation["op"] != "add" and not present:
        raise SpecError(f"{path}: {operation['op']} {pointer}: there is no such field; correct it")
    if operation["op"] == "remove":
        del node[index]
    elif isinstance(node, list) and operation["op"] == "add":
        node.insert(index, copy.deepcopy(operation["value"]))
    else:
        node[index] = copy.deepcopy(operation["value"])
