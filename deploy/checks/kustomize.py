"""Build as much of a kustomization as the checks need: `kustomize build` without its binary.

resources, components, patches (JSON 6902, or objects merged by key), namespace, images, labels.
Anything else is refused by name, with the way round: give the output of `kubectl kustomize`. What
kustomize would skip without a word, a patch that meets no object, is an error here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from posixpath import dirname, join, normpath
from typing import Any

import yaml

from deploy.checks.findings import Manifest
from deploy.manifests.objects import Object
from protocols.errors import SpecError

FILES = ("kustomization.yaml", "kustomization.yml", "Kustomization")
KEYS = {
    "apiVersion", "kind", "metadata", "resources", "components", "patches", "namespace", "images",
    "labels",
}  # fmt: skip
CLUSTER_WIDE = {
    "Namespace", "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "StorageClass",
    "PersistentVolume", "PriorityClass",
}  # fmt: skip
# libyaml's where PyYAML was built with it: it reads the manifests ten times faster.
LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def build(tree: Mapping[str, str], target: str) -> list[Object]:
    """Return the objects of one kustomization of a tree of texts by path: `build(tree,
    "overlays/gpu")`. Raises SpecError."""
    return [found.value for found in built(tree, target)]


def built(tree: Mapping[str, str], target: str) -> list[Manifest]:
    """Return the objects likewise, each with its file. Raises SpecError."""
    objects: list[Manifest] = []
    _include(tree, target, objects)
    return objects


def targets(tree: Mapping[str, str]) -> list[str]:
    """Return the folders that may be applied: kustomizations that are no part of another one, and
    every one in a folder `overlays`."""
    found = {dirname(path): read for path, read in _kustomizations(tree) if _may_be_applied(read)}
    parts = {
        normpath(join(folder, name))
        for folder, read in found.items()
        for name in [*_list(read, "resources"), *_list(read, "components")]
    }
    return sorted(f for f in found if f not in parts or "overlays" in f.split("/"))


def files_of(tree: Mapping[str, str]) -> set[str]:
    """Return every path that a kustomization of the tree names, and the kustomizations."""
    named = set()
    for path, read in _kustomizations(tree):
        named.add(path)
        for key in ("resources", "components"):
            named |= {normpath(join(dirname(path), str(name))) for name in _list(read, key)}
        named |= {normpath(join(dirname(path), str(p["path"]))) for p in _list(read, "patches")
                  if isinstance(p, dict) and "path" in p}  # fmt: skip
    return named


def _kustomizations(tree: Mapping[str, str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for path, text in tree.items():
        if path.rpartition("/")[2] in FILES:
            read = _loaded(text, path)
            yield path, read if isinstance(read, dict) else {}


def _may_be_applied(read: Mapping[str, Any]) -> bool:
    return read.get("kind", "Kustomization") == "Kustomization"


def _list(read: Mapping[str, Any], key: str) -> list[Any]:
    return list(read.get(key) or ())


def _include(tree: Mapping[str, str], folder: str, objects: list[Manifest]) -> None:
    folder = normpath(folder)
    path = next((p for p in (normpath(join(folder, f)) for f in FILES) if p in tree), None)
    if path is None:
        raise SpecError(f"{folder}: has no kustomization.yaml; correct the path that names it")
    asked = _loaded(tree[path], path)
    if unknown := set(asked) - KEYS:
        raise SpecError(
            f"{path}: {min(unknown)} is not known here (known: {', '.join(sorted(KEYS))}); check "
            f"what it builds: kubectl kustomize {folder} | forge k8s check -"
        )
    own: list[Manifest] = []
    for name in _list(asked, "resources"):
        inner = normpath(join(folder, name))
        if inner in tree:
            values = yaml.load_all(tree[inner], LOADER)
            own += [Manifest(v, inner) for v in values if v is not None]
        else:
            _include(tree, inner, own)
    # A component patches what its kustomization has gathered so far.
    for name in _list(asked, "components"):
        _include(tree, normpath(join(folder, name)), own)
    if asked.get("kind") == "Component":
        objects += own
        own = objects
    for patch in _list(asked, "patches"):
        _patch(tree, path, patch, own)
    if space := asked.get("namespace"):
        for found in own:
            _move(found, space)
    for image in _list(asked, "images"):
        _retag((m.value for m in own), image)
    for labels in _list(asked, "labels"):
        for found in own:
            found.value["metadata"].setdefault("labels", {}).update(labels.get("pairs") or {})
    if own is not objects:
        objects += own


def _loaded(text: str, path: str) -> Any:
    try:
        return yaml.load(text, LOADER)
    except yaml.YAMLError as error:
        raise SpecError(
            f"{path}: is no YAML ({' '.join(str(error).split())}); correct it"
        ) from error


def _move(found: Manifest, space: str) -> None:
    if found.kind == "Namespace":
        found.value["metadata"]["name"] = space
    elif found.kind not in CLUSTER_WIDE:
        found.value["metadata"]["namespace"] = space
    for subject in found.value.get("subjects") or ():
        if subject.get("kind") == "ServiceAccount":
            subject["namespace"] = space


def _retag(values: Iterable[Any], image: Mapping[str, Any]) -> None:
    """Replace an image by name in every container below, as kustomize's `images` does."""
    for value in values:
        inner = value.values() if isinstance(value, dict) else value
        if not isinstance(value, dict | list):
            continue
        if isinstance(value, dict) and isinstance(text := value.get("image"), str):
            name, tag = split_image(text)
            if name == image["name"]:
                digest = f"@{image['digest']}" if "digest" in image else ""
                new = f":{image['newTag']}" if "newTag" in image else tag
                value["image"] = f"{image.get('newName', name)}{digest or new}"
        _retag(inner, image)


def split_image(text: str) -> tuple[str, str]:
    """Return an image's name, and its tag or digest with the mark: `("reg:5000/a", ":1")`."""
    name, at, digest = text.partition("@")
    if at:
        return name, f"@{digest}"
    head, colon, tag = name.rpartition(":")
    return (head, f":{tag}") if colon and "/" not in tag else (name, "")


def _patch(
    tree: Mapping[str, str], path: str, patch: Mapping[str, Any], objects: list[Manifest]
) -> None:
    text = patch.get("patch")
    if text is None:
        file = normpath(join(dirname(path), str(patch.get("path"))))
        if file not in tree:
            raise SpecError(f"{path}: there is no patch {file}; correct the path")
        text = tree[file]
    change = _loaded(text, path)
    target = patch.get("target") or {
        "kind": change["kind"], "name": change["metadata"]["name"],
    }  # fmt: skip
    met = [m for m in objects if _meets(m, target)]
    if not met:
        raise SpecError(f"{path}: a patch meets no object: {target}; remove it")
    for found in met:
        if isinstance(change, list):
            for operation in change:
                apply(found.value, operation, path)
        elif change.get("$patch") == "delete":
            objects.remove(found)
        else:
            _merge(found.value, change)


def _merge(value: Any, change: Mapping[str, Any]) -> None:
    """Merge a patch of the same form: mappings by key, lists of named items by name, other lists
    and values as a whole; null removes."""
    for key, new in change.items():
        old = value.get(key)
        if new is None:
            value.pop(key, None)
        elif key in ("metadata",) and isinstance(new, dict):
            _merge(value.setdefault(key, {}), {k: v for k, v in new.items() if k != "name"})
        elif isinstance(new, dict) and isinstance(old, dict):
            _merge(old, new)
        elif isinstance(new, list) and isinstance(old, list) and all(map(_is_named, [*new, *old])):
            there = {item["name"]: item for item in old}
            for item in new:
                if item["name"] in there:
                    _merge(there[item["name"]], item)
                else:
                    old.append(copy.deepcopy(item))
        else:
            value[key] = copy.deepcopy(new)


def _is_named(item: Any) -> bool:
    return isinstance(item, dict) and "name" in item


def apply(found: Object, operation: Mapping[str, Any], path: str) -> None:
    """Apply one operation of RFC 6902 (add, replace, remove) in place. Raises SpecError."""
    if operation["op"] not in ("add", "replace", "remove"):
        raise SpecError(f"{path}: {operation['op']} is not known here; use add, replace or remove")
    *way, last = _pointer(operation["path"])
    where: Any = found
    for key in way:
        where = _step(where, key, operation["path"], path)
    index: Any = int(last) if isinstance(where, list) and last != "-" else last
    present = index in where if isinstance(where, dict) else index != "-" and index < len(where)
    if operation["op"] != "add" and not present:
        raise SpecError(
            f"{path}: {operation['op']} {operation['path']}: there is no such field; correct it"
        )
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


def _meets(found: Manifest, target: Mapping[str, str]) -> bool:
    return all(
        asked == having
        for key, having in (("kind", found.kind), ("name", found.name), ("group", found.group))
        if (asked := target.get(key)) is not None
    )
