"""Resolve `meshes/x.yaml`, its config, `--config` overlays and `--set` overrides to a RunSpec, and
`meshes/serve.yaml` with `--set` overrides to a ServeSpec.

    mesh file                <-  --set of a mesh key
    config it names  <-  --config FILE, in order  <-  --set of a config key

Later values win; mappings merge key by key, everything else is replaced as a whole. Every value
keeps the location where it was written: errors name it, and a relative path starts there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from protocols.errors import SpecError
from protocols.spec.errors import (
    SpecProblem,
    combined,
    dotted,
    fault,
    faults_of,
    place_of,
    unknown_key,
    unknown_override,
)
from protocols.spec.learn import LearnSpec
from protocols.spec.mesh import LEARN_KEYS, MESH_KEYS, MeshSpec, RunSpec
from protocols.spec.sections import ModelSpec
from protocols.spec.serving import SERVE_KEYS, ServeSpec
from protocols.spec.yaml_source import Key, SourceLocation, YamlDocument, parse_value, read_yaml

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
        return place_of(path, self.mesh_places if path[0] in MESH_KEYS else self.learn_places)


def load_spec(mesh: str, *, overlays: Sequence[str] = (), sets: Sequence[str] = ()) -> LoadedSpec:
    """Read and check a mesh file with its config, `--config` overlays and `--set` overrides.

    `sets` are `key.path=value` texts; the value is YAML, and an empty one is null. Raises one
    SpecError with every problem found, a line each with rule, got, file:line, key and remedy.
    """
    faults: list[SpecProblem] = []
    mesh_document = read_yaml(Path(mesh), mesh)
    mesh_values, mesh_places = dict(mesh_document.values), dict(mesh_document.places)
    mesh_sets, learn_sets = _route(sets, faults)

    _expand(mesh_values, "hosts", "kind")
    for override in mesh_sets:
        _override(mesh_values, mesh_places, override, faults)
        _expand(mesh_values, "hosts", "kind")
    mesh_spec = _checked(MeshSpec, mesh_values, mesh_places, faults)

    learn_spec = None
    document = _config_document(mesh_values, mesh_places, faults)
    if document is not None:
        learn_values, learn_places = dict(document.values), dict(document.places)
        for overlay in overlays:
            over = _read(Path(overlay), overlay, faults)
            if over is not None:
                _merge(learn_values, learn_places, over)
        _expand(learn_values, "model", "path")
        for override in learn_sets:
            _override(learn_values, learn_places, override, faults)
            _expand(learn_values, "model", "path")
        learn_spec = _checked(LearnSpec, learn_values, learn_places, faults)
    if faults or mesh_spec is None or learn_spec is None:
        raise combined(faults)
    spec = RunSpec(
        mesh=_with_local_files(mesh_spec, mesh_places),
        learn=_with_local_paths(learn_spec, learn_places),
    )
    return LoadedSpec(spec, mesh_places, learn_places)


@dataclass(frozen=True)
class LoadedServeSpec:
    """Hold a server's resolved spec and where each of its keys was written."""

    spec: ServeSpec
    places: Mapping[Key, SourceLocation]

    def place(self, key: str) -> SourceLocation:
        """Return where a dotted key, such as `"http.listen"`, or its nearest parent was written."""
        return place_of(tuple(key.split(".")), self.places)


def load_serve(path: str, *, sets: Sequence[str] = ()) -> LoadedServeSpec:
    """Read and check `meshes/serve.yaml` with `--set` overrides. Raises SpecError as `load_spec`
    does."""
    faults: list[SpecProblem] = []
    document = read_yaml(Path(path), path)
    values, places = dict(document.values), dict(document.places)
    for override in _overrides(sets, faults):
        if override.key[0] in SERVE_KEYS:
            _override(values, places, override, faults)
        else:
            faults.append(unknown_key(override.key[:1], ServeSpec, override.place))
    spec = _checked(ServeSpec, values, places, faults)
    if faults or spec is None:
        raise combined(faults)
    model = _with_local_model(spec.model, place_of(("model", "path"), places).directory)
    library = str(_absolute(spec.library, place_of(("library",), places).directory))
    return LoadedServeSpec(spec.model_copy(update={"model": model, "library": library}), places)


def load_file(model: type[Model], path: Path) -> Model:
    """Read and check a spec that is one file. Raises SpecError as `load_spec` does."""
    faults: list[SpecProblem] = []
    document = read_yaml(path, str(path))
    spec = _checked(model, document.values, document.places, faults)
    if spec is None:
        raise combined(faults)
    return spec


def load_resolved(path: Path) -> RunSpec:
    """Read a resolved spec that a run wrote with `dump_yaml(spec.as_dict())`.

    Raises SpecError as `load_spec` does.
    """
    return load_file(RunSpec, path)


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
    for override in _overrides(sets, faults):
        if override.key[0] in MESH_KEYS:
            mesh.append(override)
        elif override.key[0] in LEARN_KEYS:
            learn.append(override)
        else:
            faults.append(unknown_override(override.key, override.place))
    return mesh, learn


def _overrides(sets: Sequence[str], faults: list[SpecProblem]) -> list[SetOverride]:
    """Parse `--set` texts; one that cannot be parsed becomes a problem."""
    found = []
    for text in sets:
        place = SourceLocation(f"--set {text}", 0, Path.cwd())
        name, equals, value_text = text.partition("=")
        key = tuple(part.strip() for part in name.split("."))
        if not equals or not all(key):
            faults.append(
                SpecProblem(
                    place, f"--set takes key.path=value: got {text!r}; write --set train.lr=0.01"
                )
            )
            continue
        try:
            found.append(SetOverride(key, parse_value(value_text, place.source), place))
        except SpecError as error:
            faults.append(SpecProblem(place, str(error)))
    return found


def _override(
    values: dict[str, Any],
    places: dict[Key, SourceLocation],
    override: SetOverride,
    faults: list[SpecProblem],
) -> None:
    """Set one key, making the mappings on its path."""
    *parents, leaf = override.key
    section = values
    done: Key = ()
    for name in parents:
        done = (*done, name)
        below = section.get(name)
        if below is not None and not isinstance(below, dict):
            rule, remedy = "must be a mapping to set a key in it", f"set {dotted(done)} as a whole"
            faults.append(fault(rule, below, override.place, done, remedy))
            return
        if below is None:
            places[done] = override.place
        section[name] = dict(below or {})
        section = section[name]
    section[leaf] = override.value
    _forget(places, override.key)
    places[override.key] = override.place


def _merge(values: dict[str, Any], places: dict[Key, SourceLocation], over: YamlDocument) -> None:
    """Merge a document into the values: mappings merge, everything else is replaced."""

    def lay(target: dict[str, Any], source: Mapping[str, Any], key: Key) -> None:
        for name, value in source.items():
            child = (*key, name)
            if isinstance(value, dict) and isinstance(target.get(name), dict):
                target[name] = dict(target[name])
                lay(target[name], value, child)
                continue
            target[name] = value
            _forget(places, child)
            places.update({k: p for k, p in over.places.items() if k[: len(child)] == child})

    lay(values, over.values, ())


def _forget(places: dict[Key, SourceLocation], key: Key) -> None:
    for old in [k for k in places if k[: len(key)] == key]:
        del places[old]


def _expand(values: dict[str, Any], section: str, key: str) -> None:
    """Expand a short form: `hosts: kubernetes` is `hosts: {kind: kubernetes}`."""
    if isinstance(values.get(section), str):
        values[section] = {key: values[section]}


def _checked(
    model: type[Model],
    values: Mapping[str, Any],
    places: Mapping[Key, SourceLocation],
    faults: list[SpecProblem],
) -> Model | None:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        faults.extend(faults_of(error, model, places))
        return None


def _config_document(
    values: Mapping[str, Any], places: Mapping[Key, SourceLocation], faults: list[SpecProblem]
) -> YamlDocument | None:
    """Return the config that a mesh names; a missing file is a problem at the mesh's key."""
    name = values.get("config")
    if not isinstance(name, str) or not name:
        return None  # the mesh's validation reports it
    place = places[("config",)]
    path = place.directory / name
    if not path.is_file():
        rule = f"must name a learning config (there is no file {_shown(path)})"
        remedy = "give its path relative to the mesh file"
        faults.append(fault(rule, name, place, ("config",), remedy))
        return None
    return _read(path, _shown(path), faults)


def _read(path: Path, source: str, faults: list[SpecProblem]) -> YamlDocument | None:
    try:
        return read_yaml(path, source)
    except SpecError as error:
        faults.append(SpecProblem(SourceLocation(source, 0, path.parent), str(error)))
        return None


def _shown(path: Path) -> str:
    """Return a path as messages show it, relative below the current directory: `configs/x.yaml`."""
    text = os.path.normpath(path)
    return os.path.relpath(text) if Path(text).is_relative_to(Path.cwd()) else text


def _with_local_files(spec: MeshSpec, places: Mapping[Key, SourceLocation]) -> MeshSpec:
    """Return the spec with the paths of its config and of its certificate absolute."""
    config = str(_absolute(spec.config, places[("config",)].directory))
    pems = {
        key: str(_absolute(path, place_of(("control", key), places).directory))
        for key in ("tls_cert", "tls_key")
        if (path := getattr(spec.control, key)) is not None
    }
    control = spec.control.model_copy(update=pems)
    return spec.model_copy(update={"config": config, "control": control})


def _with_local_paths(spec: LearnSpec, places: Mapping[Key, SourceLocation]) -> LearnSpec:
    """Return the spec with local paths absolute; hub ids and URLs stay as they are."""
    data, study = spec.data, spec.self_study
    model = _with_local_model(spec.model, place_of(("model", "path"), places).directory)

    def local(value: str, *key: str) -> str:
        return str(_absolute(value, place_of(key, places).directory))

    if data.path is not None and not data.path.startswith(("http://", "https://")):
        several = data.path.split(os.pathsep) if data.source == "documents" else [data.path]
        paths = os.pathsep.join(local(path, "data", "path") for path in several)
        data = data.model_copy(update={"path": paths})
    if data.questions is not None:
        questions = local(data.questions, "data", "questions")
        data = data.model_copy(update={"questions": questions})
    if study is not None and study.rows is not None:
        study = study.model_copy(update={"rows": local(study.rows, "self_study", "rows")})
    return spec.model_copy(update={"model": model, "data": data, "self_study": study})


def _with_local_model(model: ModelSpec, directory: Path) -> ModelSpec:
    local = _absolute(model.path, directory)
    if model.path.startswith((".", "/", "~")) or local.is_dir():
        return model.model_copy(update={"path": str(local)})
    return model


def _absolute(path: str, directory: Path) -> Path:
    return Path(os.path.abspath(directory / Path(path).expanduser()))
