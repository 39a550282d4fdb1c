"""As much of `kustomize build` as the rendered tree uses, to check what would be applied.

resources, components and JSON 6902 patches (RFC 6902: add, replace, remove) by kind and name. What
kustomize would skip without a word, a patch that meets no object, is an error here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from posixpath import join, normpath
from typing import Any

import yaml

from deploy.manifests.objects import Object
from protocols.errors import SpecError

KEYS = {"apiVersion", "kind", "resources", "components", "patches"}
# libyaml's where PyYAML was built with it: it reads the manifests ten times faster.
LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def build(tree: Mapping[str, str], target: str) -> list[Object]:
    """The objects of one kustomization: `build(tree, "overlays/gpu")`. Raises SpecError."""
    objects: list[Object] = []
    _include(tree, target, objects)
    return objects


def targets(tree: Mapping[str, str]) -> list[str]:
    """What may be applied: every overlay of the tree."""
    ending = "/kustomization.yaml"
    return sorted(
        path.removesuffix(ending)
        for path in tree
        if path.startswith("overlays/") and path.endswith(ending)
    )


def name_of(found: Object) -> str:
    """Name an object as faults do: `Job/controller`."""
    return f"{found['kind']}/{found['metadata']['name']}"


def _include(tree: Mapping[str, str], folder: str, objects: list[Object]) -> None:
    path = f"{folder}/kustomization.yaml"
    if path not in tree:
        raise SpecError(f"{folder}: has no kustomization.yaml; correct the path that names it")
    asked = yaml.load(tree[path], LOADER)
    if unknown := set(asked) - KEYS:
        raise SpecError(f"{path}: {min(unknown)} is not known here; use {', '.join(sorted(KEYS))}")
    for name in [*asked.get("resources", ()), *asked.get("components", ())]:
        inner = normpath(join(folder, name))
        if inner in tree:
            objects += [o for o in yaml.load_all(tree[inner], LOADER) if o is not None]
        else:
            _include(tree, inner, objects)
    for patch in asked.get("patches", ()):
        met = [o for o in objects if _meets(o, patch["target"])]
        if not met:
            raise SpecError(f"{path}: a patch meets no object: {patch['target']}; remove it")
        for found in met:
            for operation in yaml.load(patch["patch"], LOADER):
                apply(found, operation, path)


def apply(found: Object, operation: Mapping[str, Any], path: str) -> None:
    """One operation of RFC 6902, in place."""
    *way, last = _pointer(operation["path"])
    where: Any = found
    for key in way:
        where = _step(where, key, operation["path"], path)
    index: Any = int(last) if isinstance(where, list) and last != "-" else last
    present = index in where if isinstance(where, dict) else index != "-" and index < len(where)
    if operation["op"] != "add" and not present:
        raise SpecError(f"{path}: {operation['op']} {operation['path']}: there is no such field")
    if operation["op"] == "remove":
        del where[index]
        return
    value = copy.deepcopy(operation["value"])
    if isinstance(where, list) and operation["op"] == "add":
        where.insert(len(where) if index == "-" else index, value)
    else:
        where[index] = value


def _step(where: Any, key: str, pointer: str, path: str) -> Any:
    try:
        return where[int(key) if isinstance(where, list) else key]
    except (KeyError, IndexError, TypeError, ValueError):
        raise SpecError(f"{path}: {pointer}: there is no {key}; correct the path") from None


def _pointer(path: str) -> Iterator[str]:
    return (part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:])


def _meets(found: Object, target: Mapping[str, str]) -> bool:
    named = target.get("name", found["metadata"]["name"])
    return bool(found["kind"] == target["kind"] and found["metadata"]["name"] == named)
