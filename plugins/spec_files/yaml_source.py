"""Read YAML with the line of every key, so that an error can name what the user wrote.

Only YAML 1.2's core types are read: `no` is a word, `1e-3` a number, `2024-01-01` text. Duplicate
keys, aliases and custom tags are refused: each makes a file mean something other than it shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from cartridge_forge.protocols.errors import SpecError

Key = tuple[str | int, ...]  # ("evaluate", "arms", 2)


@dataclass(frozen=True)
class SourceLocation:
    """Locate a written value: `SourceLocation("meshes/x.yaml", 14, Path("meshes"))`.

    `line` counts from 1; 0 means no line (an override on the command line, a missing file).
    Relative paths in the value start at `directory`.
    """

    source: str
    line: int
    directory: Path

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True)
class YamlDocument:
    """Hold values and their locations: `places` has every key and list item; `()` is the file."""

    values: dict[str, Any]
    places: dict[Key, SourceLocation]


_CORE_TYPES: tuple[tuple[str, str, str], ...] = (  # (tag, pattern, first characters)
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9_]*)(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
        "-+.0123456789",
    ),
)


class YamlLoader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own hook

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise _refusal(
                f"the alias *{event.anchor} is not read here; write the value out", event
            )
        return super().compose_node(parent, index)


class YamlDumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own hook

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


for _tag, _pattern, _first in _CORE_TYPES:
    for _class in (YamlLoader, YamlDumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}",
            re.compile(rf"^(?:{_pattern})$"),
            ["" if c == "\0" else c for c in _first],
        )


def read_yaml(path: Path, source: str) -> YamlDocument:
    """Return the mapping in a YAML file; `source` is its name in messages.

    Raises SpecError, one line with file and line, when the file cannot be read, is not UTF-8, is
    not YAML, is empty, is no mapping, or gives a key twice.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise SpecError(f"there is no file {source}; check the path") from None
    except OSError as error:
        raise SpecError(f"cannot read {source}: {error.strerror}; give a YAML file") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise SpecError(
            f"the file must be UTF-8: got byte 0x{raw[error.start]:02x} at {source}:{line}; "
            "save it as UTF-8"
        ) from None
    return parse_document(text, source, path.parent)


def parse_document(text: str, source: str, directory: Path) -> YamlDocument:
    """Return the mapping in a YAML text, with locations. Raises SpecError as `read_yaml` does."""
    values, places = _parse(text, source, directory)
    if values is None:
        raise SpecError(f"{source} is empty; write the keys of the spec into it")
    if not isinstance(values, dict):
        raise SpecError(
            f"the file must be a mapping of keys: got {show(values)} at {places[()]}; "
            "write `key: value` lines"
        )
    return YamlDocument(values, places)


def parse_value(text: str, source: str) -> Any:
    """Parse a command-line value as YAML: `"0.02"`, `"[recite, question]"`, `""` for null.

    Raises SpecError when it is no YAML.
    """
    return _parse(text, source, Path())[0]


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Return block-style YAML that `read_yaml` reads back as the same values."""
    # Characters beyond ASCII are escaped: PyYAML does not read all of them back as it wrote them.
    return yaml.dump(dict(values), Dumper=YamlDumper, sort_keys=False, default_flow_style=False)


def show(value: Any) -> str:
    """Return a value as errors show it: short, in YAML's words: `'text'`, null, true, [1, 2]."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        text = "[" + ", ".join(v if isinstance(v, str) else show(v) for v in value) + "]"
    else:
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@lru_cache(maxsize=64)  # a command reads its mesh and config several times
def _composed(text: str) -> tuple[YamlLoader, yaml.Node | None]:
    loader = YamlLoader(text)
    return loader, loader.get_single_node()


def _parse(text: str, source: str, directory: Path) -> tuple[Any, dict[Key, SourceLocation]]:
    places: dict[Key, SourceLocation] = {}
    try:
        loader, node = _composed(text)
        if node is None:
            return None, places
        places[()] = SourceLocation(source, node.start_mark.line + 1, directory)
        return _build(loader, node, (), places), places
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise SpecError(_syntax_message(error, source, mark.line if mark else 0)) from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise SpecError(
            f"the file must be plain text: got character U+{ord(text[error.position]):04X} at "
            f"{source}:{line}; remove it"
        ) from None
    except RecursionError:
        raise SpecError(f"{source} nests too deeply to be a spec; flatten it") from None


def _syntax_message(error: yaml.MarkedYAMLError, source: str, line: int) -> str:
    problem = error.problem or "it cannot be parsed"
    if "'\\t'" in problem:
        return f"a tab cannot indent YAML at {source}:{line + 1}; use spaces"
    what, _, remedy = problem.partition("; ")
    remedy = remedy or "check indentation, colons, quotes and brackets"
    return f"the text must be valid YAML: {what} at {source}:{line + 1}; {remedy}"


def _build(loader: YamlLoader, node: yaml.Node, key: Key, places: dict[Key, SourceLocation]) -> Any:
    """Return the node's value; adds the location of every key and item below `key` to `places`."""
    location = places[key]
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            name = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or not key_node.tag.endswith(":str"):
                raise _refusal("a key is not text; quote it or remove it", key_node)
            child = (*key, name)
            if name in mapping:
                first = places[child].line
                raise _refusal(
                    f"key {name} is given twice, first on line {first}; remove one", key_node
                )
            places[child] = replace(location, line=key_node.start_mark.line + 1)
            mapping[name] = _build(loader, value_node, child, places)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            child = (*key, index)
            places[child] = replace(location, line=item.start_mark.line + 1)
            items.append(_build(loader, item, child, places))
        return items
    try:
        return loader.construct_object(node)
    except ValueError:  # an integer of thousands of digits
        raise _refusal("a number is too long; shorten it", node) from None


def _refusal(problem: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)
