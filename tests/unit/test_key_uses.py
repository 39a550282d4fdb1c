"""Every key of a spec file is used in a shipped file or shown in a guide."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from re import fullmatch
from textwrap import dedent
from typing import Any, get_origin

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from cartridge_forge.plugins.episodes.handbooks.file import HandbookFile
from cartridge_forge.plugins.evaluate.spec import FrontierSpec
from cartridge_forge.plugins.spec_files.keys import section_in, spec_files

ROOT = Path(__file__).parents[2]
SHIPPED = ("meshes", "configs", "deploy", "studies", "examples", "recipes")
GUIDES = ("docs/how-to", "docs/tutorials", "docs/explanation")
BLOCK = re.compile(r"^( *)```yaml[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def dotted(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the keys of a YAML value, `train.lr`; those of a list's items as the list's."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield f"{prefix}{name}"
            yield from dotted(inner, f"{prefix}{name}.")
            if prefix.rpartition(".")[0].rpartition(".")[2] in ("set", "axes"):
                yield str(name)  # a sweep's keys of a mesh or config
                yield from dotted(inner, f"{name}.")
    elif isinstance(value, list):
        for item in value:
            yield from dotted(item, prefix)


def yaml_keys(text: str) -> set[str]:
    try:
        return set(dotted(yaml.safe_load(text)))
    except yaml.YAMLError:
        return set()  # a template, or an example of a wrong file


def names_in(text: str) -> set[str]:
    """Return the dotted keys that a guide names, the words that it gives a value in code, and the
    keys of its YAML. A word of code alone may be another's name."""
    names = set(re.findall(r"(?<![\w./-])[a-z_]\w*(?:\.\w+)+", text))
    names |= set(re.findall(r"`([a-z_]\w*)[:=][^`\n]*`", text))
    for _, block in BLOCK.findall(text):
        names |= yaml_keys(dedent(block))
    return names


def used_names() -> set[str]:
    names: set[str] = set()
    for folder in SHIPPED:
        for path in (ROOT / folder).rglob("*.yaml"):
            names |= yaml_keys(path.read_text("utf-8"))
    for folder in GUIDES:
        for path in (ROOT / folder).rglob("*.md"):
            names |= names_in(path.read_text("utf-8"))
    return names


def leaves(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, tuple[type, str]]]:
    """Yield each leaf key below a section, with * for a name in a mapping, and the class and name
    of its field: what several sections share by a class is one key."""
    for name, field in section.model_fields.items():
        key, below = f"{prefix}{field.alias or name}", section_in(field.annotation)
        if below is not None:
            is_mapping = get_origin(field.annotation) is dict
            yield from leaves(below, f"{key}.*." if is_mapping else f"{key}.")
            continue
        owners = [c for c in section.__mro__ if name in vars(c).get("__annotations__", ())]
        yield key, (owners[-1], name)


def pattern(key: str) -> str:
    return key.replace(".", r"\.").replace("*", r"\w+")


def unused_keys() -> dict[str, str]:
    """Return the keys that are used nowhere, by the files that have them."""
    names = used_names()
    places = [(file, *leaf) for file in spec_files() for leaf in leaves(file.root)]
    used = {field for _, key, field in places if any(fullmatch(pattern(key), n) for n in names)}
    return {key: file.what for file, key, field in places if field not in used}


def test_what_counts_as_a_use() -> None:
    guide = """Set `spares: 1`, `plane`, train.lr or x/evaluate.arms.
    ```yaml title="a.yaml"
    roles: {generator: {threads: 2}}
    set: {loss.beta: 1}
    ```
    """
    assert names_in(guide) == {
        "spares", "train.lr", "a.yaml", "roles", "roles.generator", "roles.generator.threads",
        "set", "set.loss.beta", "loss.beta",
    }  # fmt: skip


def test_every_key_is_used_in_a_shipped_file_or_shown_in_a_guide() -> None:
    assert unused_keys() == {}


GUIDE_BLOCKS = [
    pytest.param(block, id=f"{path.stem}-{number}")
    for folder in GUIDES
    for path in sorted((ROOT / folder).rglob("*.md"))
    for number, (_, block) in enumerate(BLOCK.findall(path.read_text("utf-8")))
]


@pytest.mark.parametrize("block", GUIDE_BLOCKS)
def test_a_guide_shows_keys_that_are_there_with_values_that_they_take(block: str) -> None:
    """In YAML of a mesh, config, server and so on, or of a part of one."""
    try:
        values = yaml.safe_load(dedent(block))
    except yaml.YAMLError:
        return  # a template, or an example of a wrong file
    roots = [*(file.root for file in spec_files()), FrontierSpec, HandbookFile]
    names = set(values) if isinstance(values, dict) else set()
    root = max(roots, key=lambda r: len(names & r.model_fields.keys()))
    if not names & root.model_fields.keys() or "apiVersion" in names:
        return  # another's file
    try:
        root.model_validate(values)
    except ValidationError as error:
        wrong = [(e["loc"], e["msg"]) for e in error.errors() if e["type"] != "missing"]
        assert wrong == []
