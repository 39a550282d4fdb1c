"""Resolve `meshes/x.yaml`, its config, `--config` overlays and `--set` overrides to a RunSpec, and
other spec files, each with `--set` overrides, to their specs.

    mesh file                <-  --set of a mesh key
    config it names  <-  --config FILE, in order  <-  --set of a config key

Later values win; mappings merge key by key, everything else is replaced as a whole. Every value
keeps the location where it was written: errors name it, and a relative path starts there.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from cartridge_forge.plugins.spec_files.errors import (
    SpecProblem,
    combined,
    dotted,
    fault,
    faults_of,
    place_of,
    unknown_key,
    unknown_override,
)
from cartridge_forge.plugins.spec_files.keys import (
    MESH_FILE,
    SpecFile,
    is_known,
    keys_of,
    known_at,
    may_hold_secret,
    named_config,
    named_mesh,
    path_rule,
    read_of_kind,
    shown_path,
    spec_files,
)
from cartridge_forge.plugins.spec_files.unread import without_unread
from cartridge_forge.plugins.spec_files.yaml_source import (
    Key,
    SourceLocation,
    YamlDocument,
    parse_value,
    read_yaml,
)
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.secrets import HIDDEN, IN_ADDRESS, SHORTEST
from cartridge_forge.protocols.spec.base import JoinedSection, PathRule
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.spec.mesh import MeshSpec, RunSpec
from cartridge_forge.protocols.spec.model import settled

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class LoadedSpec:
    """Hold a resolved spec and where each of its keys was written."""

    spec: RunSpec
    mesh_places: Mapping[Key, SourceLocation]
    learn_places: Mapping[Key, SourceLocation]

    def place(self, key: str) -> SourceLocation:
        """Return where a dotted key, such as `"train.lr"`, or its nearest parent was written."""
        path: Key = tuple(key.split("."))
        of_mesh = path[0] in MeshSpec.joined().model_fields
        return place_of(path, self.mesh_places if of_mesh else self.learn_places)


def load_spec(mesh: str, *, overlays: Sequence[str] = (), sets: Sequence[str] = ()) -> LoadedSpec:
    """Read and check a mesh file with its config, `--config` overlays and `--set` overrides.

    `sets` are `key.path=value` texts; the value is YAML, and an empty one is null. Raises one
    SpecError with every problem found, a line each with rule, got, file:line, key and remedy.
    """
    faults: list[SpecProblem] = []
    mesh_document = read_of_kind(MESH_FILE, *named_mesh(mesh))
    mesh_sets, learn_sets = _route(sets, faults)
    _apply(mesh_document, mesh_sets, faults, "hosts", "kind")
    mesh_spec = _checked(MeshSpec, mesh_document, faults)

    learn_spec = None
    document = _config_document(mesh_document, faults)
    if document is not None:
        for overlay in overlays:
            overlay_document = _read(*named_config(overlay), faults)
            if overlay_document is not None:
                _merge(document, overlay_document)
        _apply(document, learn_sets, faults, "model", "path")
        learn_spec = _checked(LearnSpec, document, faults)
    if faults or mesh_spec is None or document is None or learn_spec is None:
        raise combined(faults)
    mesh_spec = _with_local_paths(mesh_spec, mesh_document.places)
    learn_spec = _with_local_paths(learn_spec, document.places)
    is_local = mesh_spec.hosts.kind == "local"
    model = settled(learn_spec.model, gpus=mesh_spec.model_on_gpus, here=is_local)
    spec = RunSpec(mesh=mesh_spec, learn=learn_spec.model_copy(update={"model": model}))
    return LoadedSpec(spec, mesh_document.places, document.places)


@dataclass(frozen=True)
class LoadedFile(Generic[Model]):
    """Hold the spec of one file and where each of its keys was written."""

    spec: Model
    places: Mapping[Key, SourceLocation]

    def place(self, key: str) -> SourceLocation:
        """Return where a dotted key, such as `"http.listen"`, or its nearest parent was written."""
        return place_of(tuple(key.split(".")), self.places)


def load_sets(
    file: SpecFile, model: type[Model], path: str, sets: Sequence[str]
) -> LoadedFile[Model]:
    """Read and check a file of this kind, a shipped one by its name, with `--set` overrides. Raises
    SpecError as `load_spec` does."""
    faults: list[SpecProblem] = []
    document = read_of_kind(file, *named_mesh(path))
    names = [name for name, _ in keys_of(model)]
    for override in _overrides(sets, faults, model):
        if override.key[0] in names:
            _override(document, override, faults)
        else:
            faults.append(unknown_key(override.key[:1], known_at(model, ()), override.place))
    spec = _checked(model, document, faults)
    if faults or spec is None:
        raise combined(faults)
    return LoadedFile(_with_local_paths(spec, document.places), document.places)


def load_file(model: type[Model], path: Path) -> Model:
    """Read and check a spec that is one file. Raises SpecError as `load_spec` does."""
    faults: list[SpecProblem] = []
    kind = next((file for file in spec_files() if file.section is model), None)
    document = read_yaml(path, str(path)) if kind is None else read_of_kind(kind, path, str(path))
    spec = _checked(model, document, faults)
    if spec is None:
        raise combined(faults)
    return _with_local_paths(spec, document.places)


def load_resolved(path: Path) -> RunSpec:
    """Read a resolved spec that a run wrote with `dump_yaml(spec.as_dict())`.

    Raises SpecError with what this version cannot read, and where: nobody wrote it by hand, so the
    remedy is the version that did.
    """
    try:
        return load_file(RunSpec, path)
    except SpecError as error:
        faults = [line.partition("; ")[0] for line in str(error).splitlines()]
        remedy = "the run was made by another version: use that one, or start a new run"
        raise SpecError("\n".join([*faults, remedy])) from error


@dataclass(frozen=True)
class SetOverride:
    key: tuple[str, ...]
    value: Any
    place: SourceLocation


def _route(
    sets: Sequence[str], faults: list[SpecProblem]
) -> tuple[list[SetOverride], list[SetOverride]]:
    """Split overrides into the mesh's and the config's; any other becomes a problem."""
    mesh, learn = [], []
    for override in _overrides(sets, faults, MeshSpec, LearnSpec):
        if override.key[0] in _fields(MeshSpec, override.key[:1]):
            mesh.append(override)
        elif override.key[0] in _fields(LearnSpec, override.key[:1]):
            learn.append(override)
        else:
            faults.append(unknown_override(override.key, override.place))
    return mesh, learn


def _fields(model: type[BaseModel], keys: Sequence[str]) -> Collection[str]:
    """Return the keys of a section, with those of other packages where `keys` are none of ours."""
    return _with_keys(model, keys).model_fields.keys()


def _with_keys(model: type[BaseModel], keys: Iterable[str]) -> type[BaseModel]:
    return model.joined(keys) if issubclass(model, JoinedSection) else model


def _overrides(
    sets: Sequence[str], faults: list[SpecProblem], *roots: type[BaseModel]
) -> list[SetOverride]:
    """Parse `--set` texts of keys of the `roots`; one that cannot be parsed becomes a problem."""
    overrides = []
    for text in sets:
        name, equals, value_text = text.partition("=")
        key = tuple(part.strip() for part in name.split("."))
        owners = [_with_keys(root, key[:1]) for root in roots]
        owner = next((root for root in owners if key[0] in root.model_fields), owners[-1])
        # What a word that is no key stands for is not known; it is shown where it is short.
        unknown = len(value_text) >= SHORTEST and not is_known(owner, key)
        hidden = unknown or may_hold_secret(owner, key)
        location = SourceLocation(f"--set {name if hidden else text}", 0, Path.cwd())
        if not equals or not all(key):
            faults.append(
                SpecProblem(
                    location, f"--set takes key.path=value: got {text!r}; write --set train.lr=0.01"
                )
            )
            continue
        try:
            overrides.append(SetOverride(key, parse_value(value_text, location.source), location))
        except SpecError as error:
            faults.append(SpecProblem(location, str(error)))
    return overrides


def _apply(
    document: YamlDocument,
    overrides: Sequence[SetOverride],
    faults: list[SpecProblem],
    section: str,
    key: str,
) -> None:
    """Set the overrides. A bare word is short for a section with this key: `hosts: kubernetes` is
    `hosts: {kind: kubernetes}`."""
    for override in (None, *overrides):
        if override is not None:
            _override(document, override, faults)
        if isinstance(document.values.get(section), str):
            document.values[section] = {key: document.values[section]}


def _override(document: YamlDocument, override: SetOverride, faults: list[SpecProblem]) -> None:
    """Set one key, making the mappings on its path."""
    *parents, leaf = override.key
    section, places = document.values, document.places
    path: Key = ()
    for name in parents:
        path = (*path, name)
        below = section.get(name)
        if below is not None and not isinstance(below, dict):
            rule, remedy = "must be a mapping to set a key in it", f"set {dotted(path)} as a whole"
            faults.append(fault(rule, below, override.place, path, remedy))
            return
        if below is None:
            places[path] = override.place
        section[name] = dict(below or {})
        section = section[name]
    section[leaf] = override.value
    _forget(places, override.key)
    places[override.key] = override.place


def _merge(document: YamlDocument, overlay: YamlDocument) -> None:
    """Merge `over` into the document: mappings merge, everything else is replaced."""

    def lay(target: dict[str, Any], source: Mapping[str, Any], key: Key) -> None:
        for name, value in source.items():
            child = (*key, name)
            if isinstance(value, dict) and isinstance(target.get(name), dict):
                lay(target[name], value, child)
                continue
            target[name] = value
            _forget(document.places, child)
            document.places.update(
                {k: p for k, p in overlay.places.items() if k[: len(child)] == child}
            )

    lay(document.values, overlay.values, ())


def _forget(places: dict[Key, SourceLocation], key: Key) -> None:
    for old in [k for k in places if k[: len(key)] == key]:
        del places[old]


def _checked(model: type[Model], document: YamlDocument, faults: list[SpecProblem]) -> Model | None:
    joined: Any = _with_keys(model, document.values)
    try:
        value: Model = joined.model_validate(document.values)
    except ValidationError as error:
        faults.extend(faults_of(error, joined, document.places))
        return None
    wrong = list(_with_passwords(document.values, ()))
    for key in wrong:
        rule, remedy = "must be an address without a password", "take it out: it is written down"
        faults.append(fault(rule, HIDDEN, place_of(key, document.places), key, remedy))
    if isinstance(value, RunSpec):  # a run wrote it, and what it did not read changes nothing
        learn, _ = without_unread(value.learn)
        return value.model_copy(update={"learn": learn})
    value, problems = without_unread(value, document.places)
    faults.extend(problems)
    return None if wrong or problems else value


def _with_passwords(value: Any, key: Key) -> Iterator[Key]:
    """Yield the keys of texts with an address that has a password."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _with_passwords(inner, (*key, name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _with_passwords(inner, (*key, index))
    elif isinstance(value, str) and IN_ADDRESS.search(value):
        yield key


def _config_document(mesh: YamlDocument, faults: list[SpecProblem]) -> YamlDocument | None:
    """Return the config that a mesh names; a missing file is a problem at the mesh's key."""
    name = mesh.values.get("config")
    if not isinstance(name, str) or not name:
        return None  # the mesh's validation reports it
    location = mesh.places[("config",)]
    path = location.directory / name
    if not path.is_file():
        rule = f"must name a learning config (there is no file {shown_path(path)})"
        remedy = "give its path relative to the mesh file"
        faults.append(fault(rule, name, location, ("config",), remedy))
        return None
    return _read(path, shown_path(path), faults)


def _read(path: Path, source: str, faults: list[SpecProblem]) -> YamlDocument | None:
    try:
        return read_yaml(path, source)
    except SpecError as error:
        faults.append(SpecProblem(SourceLocation(source, 0, path.parent), str(error)))
        return None


def _with_local_paths(spec: Model, places: Mapping[Key, SourceLocation]) -> Model:
    """Return the spec with each path absolute, from the file that names it, by the rule of its
    key."""

    def local(value: Any, rule: PathRule | None, key: Key, sections: tuple[BaseModel, ...]) -> Any:
        if isinstance(value, BaseModel):
            changed = {}
            for name, field in type(value).model_fields.items():
                written, below = getattr(value, name), (*key, field.alias or name)
                resolved = local(written, path_rule(field), below, (*sections, value))
                if resolved != written:
                    changed[name] = resolved
            return value.model_copy(update=changed)
        if isinstance(value, tuple):
            return tuple(local(v, rule, (*key, i), sections) for i, v in enumerate(value))
        if isinstance(value, dict):
            return {name: local(v, rule, (*key, name), sections) for name, v in value.items()}
        if rule is None or not isinstance(value, str):
            return value
        directory = place_of(key, places).directory
        return rule.local(
            value, sections, lambda path: os.path.abspath(directory / Path(path).expanduser())
        )

    result: Model = local(spec, None, (), ())
    return result
