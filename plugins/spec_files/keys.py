"""Know the kinds of spec files: their keys with types, bounds and meanings, which of them a
misspelt or foreign name may mean, and which kind a file is of.

    meshes/*.yaml  MeshSpec    configs/*.yaml  LearnSpec    others  of plug-ins, by their table
"""

from __future__ import annotations

import difflib
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cartridge_forge.plugins.spec_files.yaml_source import YamlDocument, read_yaml, show
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.files import REPOSITORY
from cartridge_forge.protocols.plugins import SHIPPED, optional
from cartridge_forge.protocols.secrets import MARK, looks_secret
from cartridge_forge.protocols.spec.base import JoinedSection, KnownNames, PathRule, ReadWith
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.spec.mesh import MeshSpec

# What other trainers call a key. A test checks that each key exists.
OTHER_NAMES = {
    "reward_funcs": "reward",
    "reward_function": "reward",
    "reward_weights": "reward.weight",
    "dataset_name": "data.path",
    "train_files": "data.path",
    "val_files": "data.rows.held_out",
    "prompt_key": "data.rows.columns",
    "learning_rate": "train.lr",
    "max_grad_norm": "train.clip",
    "grad_clip": "train.clip",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "epochs": "train.steps",
    "num_train_epochs": "train.steps",
    "num_iterations": "train.updates_per_rollout",
    "save_steps": "train.checkpoint_every",
    "gradient_checkpointing": "train.recompute_layers",
    "max_seq_len": "train.row_tokens",
    "batch_size": "rollout.prompts",
    "max_new_tokens": "rollout.max_tokens",
    "max_completion_length": "rollout.max_tokens",
    "num_tokens": "cartridge.tokens",
    "num_virtual_tokens": "cartridge.tokens",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "torch_dtype": "model.dtype",
    "precision": "model.dtype",
    "dataset": "data.path",
    "eval_steps": "evaluate.probe_every",
}


@dataclass(frozen=True)
class SpecFile:
    """Describe a kind of spec file: its root `section`, what it is called, where it is shipped, and
    how one is used."""

    section: type[BaseModel]
    what: str
    files: str
    use: str

    @property
    def root(self) -> type[BaseModel]:
        """Return the root section with the keys of the shipped plug-ins."""
        return with_plugins(self.section)


MESH_FILE = SpecFile(MeshSpec, "a mesh", "meshes/*.yaml", "train it with forge-run {}")
CONFIG_FILE = SpecFile(
    LearnSpec,
    "a learning config",
    "configs/*.yaml",
    "give a mesh whose key config names it, or lay it over a mesh's config with --config {}",
)


@cache
def spec_files() -> tuple[SpecFile, ...]:
    """Return every kind of file: the core's, then those of the shipped plug-ins here."""
    names = [name for plugin in SHIPPED for name in plugin.files]
    files = (optional("files", name) for name in names)
    return (MESH_FILE, CONFIG_FILE, *(file for file in files if file is not None))


def with_plugins(section: type[BaseModel]) -> type[BaseModel]:
    """Return a section of the core with the keys of the shipped plug-ins; any other as it is."""
    return section.joined() if issubclass(section, JoinedSection) else section


@dataclass(frozen=True)
class SpecKey:
    """Hold one key of a spec file, such as `train.lr`; `section` is set for one with keys below.
    Below a mapping of known `names` it has their word: `roles.ROLE.threads`."""

    key: str
    file: SpecFile
    field: FieldInfo
    section: type[BaseModel] | None
    names: KnownNames | None = None

    @property
    def written(self) -> tuple[str, ...]:
        """Return the key as files have it, with each of the shipped names."""
        if self.names is None:
            return (self.key,)
        word = f".{self.names.word}."
        return tuple(self.key.replace(word, f".{name}.") for name in self.names.shipped)

    @property
    def type(self) -> str:
        """Return the type with its bounds: `a number, > 0`."""
        bounds = [text for part in self.field.metadata for text in _bounds(part)]
        text = type_text(self.field.annotation)
        if path_rule(self.field) == PathRule():  # nothing else may stand there
            text = text.replace("text", "a path")
        return ", ".join([text, *bounds])

    @property
    def meaning(self) -> str:
        """Return the description in a line, and what the key is read with."""
        marks = [mark for mark in self.field.metadata if isinstance(mark, ReadWith)]
        read = [f"read with {f'{mark.key} {values_text(mark)}'.rstrip()}" for mark in marks]
        return "; ".join([" ".join((self.field.description or "").split()), *read])

    @property
    def default(self) -> str:
        """Return the default as YAML has it, or that there is none."""
        if self.field.is_required():
            return "none: it must be given"
        value = self.field.get_default(call_default_factory=True, validated_data={})
        of_keys = isinstance(value, BaseModel) or names_of(self.field) is not None
        return "those of its keys" if of_keys else show(value)


def values_text(mark: ReadWith) -> str:
    """Return the values with which a key is read: `clinic, desk or handbook`; "" for any."""
    *first, last = ["null" if v is None else str(v) for v in mark.values] or [""]
    return f"{', '.join(first)} or {last}" if first else last


def spec_keys(file: SpecFile) -> Iterator[SpecKey]:
    """Yield every key of a file, a section before the keys in it."""
    yield from _below(file, file.root, "")


def _below(
    file: SpecFile, model: type[BaseModel], prefix: str, names: KnownNames | None = None
) -> Iterator[SpecKey]:
    for name, field in keys_of(model):
        section = section_in(field.annotation)
        key = prefix + name
        yield SpecKey(key, file, field, section, names)
        if section is not None and (known := names_of(field)) is not None:
            for entry, meaning in known.shipped.items():
                about = FieldInfo(annotation=section, default=section(), description=meaning)
                yield SpecKey(f"{key}.{entry}", file, about, section)
            yield from _below(file, section, f"{key}.{known.word}.", known)
        elif section is not None:
            yield from _below(file, section, f"{key}.", names)


def names_of(field: FieldInfo) -> KnownNames | None:
    """Return the names that a key's mapping may have, where they are known."""
    return next((part for part in field.metadata if isinstance(part, KnownNames)), None)


def keys_of(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield a section's keys as the YAML has them."""
    for name, field in model.model_fields.items():
        yield field.alias or name, field


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section in a type, its unions and their tagged members; None without one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return with_plugins(annotation)
    inner = (section_in(part) for part in typing.get_args(annotation))
    return next((section for section in inner if section is not None), None)


def section_at(model: type[BaseModel], key: tuple[str | int, ...]) -> type[BaseModel] | None:
    """Return the section that a key leads to, or None when it leads to a value."""
    section: type[BaseModel] | None = model
    for field in _way(model, key):
        section = section_in(field.annotation) if field else None
    return section


def known_at(model: type[BaseModel], key: tuple[str | int, ...]) -> list[str]:
    """Return what a mapping at a key may hold: a section's keys or known names; else nothing."""
    above = section_at(model, key[:-1]) if key else None
    field = dict(keys_of(above)).get(str(key[-1])) if above else None
    if field is not None and typing.get_origin(field.annotation) is dict:
        return list(names_of(field) or ())
    section = section_at(model, key)
    return [name for name, _ in keys_of(section)] if section else []


def may_hold_secret(model: type[BaseModel], key: tuple[str | int, ...]) -> bool:
    """Return whether what is written at a key may be a secret: the key, or the last one on its way
    that exists, names a secret or is of a section with such a key, or the word is a secret's."""
    fields_on_path = list(_way(model, key))
    fields = [field for field in fields_on_path if field is not None]
    return (bool(fields) and _names_secret(fields[-1])) or (
        None in fields_on_path and looks_secret(str(key[-1]))
    )


def is_known(model: type[BaseModel], key: tuple[str | int, ...]) -> bool:
    """Return whether each name on a key's way is a key of its section."""
    return None not in _way(model, key)


def _way(model: type[BaseModel], key: tuple[str | int, ...]) -> Iterator[FieldInfo | None]:
    """Yield the field of each name in a key, None for an unknown one; not for an item of a list nor
    for a name in a mapping of sections, which are of the section that all of them are of."""
    section: type[BaseModel] | None = model
    named, names = False, None
    for name in key:
        if named or isinstance(name, int):
            if named and names is not None and name not in names:
                yield None
            named = False
            continue
        field = dict(keys_of(section)).get(name) if section else None
        yield field
        section = section_in(field.annotation) if field else None
        named = field is not None and typing.get_origin(field.annotation) is dict
        names = names_of(field) if field else None


def _names_secret(field: FieldInfo) -> bool:
    section = section_in(field.annotation)
    return (
        MARK in field.metadata
        or _is_marked(field.annotation)
        or (section is not None and any(_names_secret(inner) for _, inner in keys_of(section)))
    )


def _is_marked(annotation: Any) -> bool:
    return any(part is MARK or _is_marked(part) for part in typing.get_args(annotation))


def path_rule(field: FieldInfo) -> PathRule | None:
    """Return the rule of a key that is a path, or a list or mapping of them; None for others."""
    return next(_path_rules(field.annotation, *field.metadata), None)


def _path_rules(*parts: Any) -> Iterator[PathRule]:
    for part in parts:
        if isinstance(part, PathRule):
            yield part
        yield from _path_rules(*typing.get_args(part))


def near_keys(name: str, keys: typing.Sequence[SpecKey]) -> list[str]:
    """Return the keys that an unknown, perhaps dotted, name may mean, the likeliest first: of the
    same last name, under another trainer's name, spelt alike, or with its words in their meaning.
    """
    leaf, names = name.rpartition(".")[2], [text for k in keys for text in k.written]
    if exact := [k for k in names if k == name or k.endswith(f".{name}")]:
        return exact
    if OTHER_NAMES.get(leaf) in names:
        return [OTHER_NAMES[leaf]]
    if same_leaf := [k for k in names if k.rpartition(".")[2] == leaf]:
        return same_leaf
    if alike := difflib.get_close_matches(name, names, 3, 0.8):
        return alike
    leaves = {k.rpartition(".")[2]: k for k in reversed(names)}
    if alike := difflib.get_close_matches(leaf, leaves, 3, 0.8):
        return [leaves[name_alike] for name_alike in alike]
    words = {word for word in leaf.lower().split("_") if len(word) > 2}
    described = [k for k in keys if words and words <= _words(k.field.description)]
    return [
        k.written[0] for k in sorted(described, key=lambda k: len(k.field.description or ""))[:3]
    ]


def other_kind(values: Mapping[str, Any], wanted: SpecFile) -> SpecFile | None:
    """Return what kind of file has these top keys, where it is not the `wanted` kind; None where it
    may be that."""

    if values.keys() <= {name for name, _ in keys_of(wanted.root)}:
        return None

    def shared(file: SpecFile) -> int:
        return len({name for name, _ in keys_of(file.root)} & values.keys())

    best = max(spec_files(), key=shared)
    return best if shared(best) > max(1, shared(wanted)) else None


def _words(meaning: str | None) -> set[str]:
    return set(re.findall(r"[a-z]+", (meaning or "").lower()))


_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def _bounds(part: Any) -> Iterator[str]:
    """Yield the bounds in a field's metadata as text."""
    for name, sign in _SIGNS.items():
        if (bound := getattr(part, name, None)) is not None:
            yield f"{sign} {bound:g}"
    if (step := getattr(part, "multiple_of", None)) is not None:
        yield f"in multiples of {step}"
    if getattr(part, "min_length", None):
        yield "not empty"


def type_text(annotation: Any) -> str:
    """Return a type in words: `a whole number or null`."""
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in plain:
        return plain[annotation]
    if annotation is type(None):
        return "null"
    if origin is typing.Annotated:
        return type_text(parts[0])
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}" if len(parts) > 1 else str(parts[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(type_text, parts)))
    if origin is tuple:
        return f"a list, each {type_text(parts[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section"
    return "a mapping of keys" if origin is dict else "a value"


def named_mesh(text: str) -> tuple[Path, str]:
    """Return the path of a mesh file and what messages call it. A name without a folder and a
    suffix, or a path as a checkout has it, is that of a shipped mesh where no such file is here:
    `longhealth` is meshes/longhealth.yaml. Raises SpecError for an unknown name."""
    return _named(text, "mesh", "meshes", "*.yaml")


def named_config(text: str, what: str = "config", pattern: str = "*.yaml") -> tuple[Path, str]:
    """Return the path of a file of configs/ and what messages call it, by a path or a shipped name
    as `named_mesh` does. `what` says what it is, and `pattern` which files are. Raises SpecError
    for an unknown name."""
    return _named(text, what, "configs", pattern)


def _named(text: str, what: str, folder: str, pattern: str) -> tuple[Path, str]:
    path = Path(text)
    shipped = REPOSITORY / (path if path.suffix else Path(folder, f"{text}.yaml"))
    if path.is_file() or path.is_absolute():
        return path, text
    if shipped.parent == REPOSITORY / folder and shipped.is_file():
        return shipped, shown_path(shipped)
    if not path.suffix and not path.exists() and path.parent == Path():
        names = ", ".join(sorted(file.stem for file in shipped.parent.glob(pattern)))
        raise SpecError(
            f"there is no {what} {text}: expected a file, or one of the shipped {names}; check the "
            "name"
        )
    return path, text


def is_shipped_mesh(text: str) -> bool:
    """Return whether a name without a folder and a suffix is that of a shipped mesh."""
    return Path(text).name == text and (REPOSITORY / "meshes" / f"{text}.yaml").is_file()


def read_of_kind(wanted: SpecFile, path: Path, source: str) -> YamlDocument:
    """Return the file's mapping. Raises SpecError for a file of another kind."""
    document = read_yaml(path, source)
    kind = other_kind(document.values, wanted)
    if kind is not None:
        use = kind.use.format(source)
        mesh = path.parent.parent / "meshes" / path.name
        if kind is CONFIG_FILE and wanted is MESH_FILE and mesh.is_file():
            use = f"give {shown_path(mesh)}, or lay it over a mesh's config with --config {source}"
        raise SpecError(f"{source} is {kind.what}, and {wanted.what} belongs here; {use}")
    return document


def shown_path(path: Path) -> str:
    """Return a path as messages show it, relative below the current directory: `configs/x.yaml`."""
    text = os.path.normpath(path)
    return os.path.relpath(text) if Path(text).is_relative_to(Path.cwd()) else text
