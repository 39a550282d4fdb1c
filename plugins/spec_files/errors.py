"""Turn pydantic's errors into lines with rule, given value, location and remedy.

replicas must be >= 1: got 0 at meshes/x.yaml:14 (roles.generator.replicas); set it to 1 or more
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cartridge_forge.plugins.spec_files.keys import (
    CONFIG_FILE,
    MESH_FILE,
    SpecKey,
    keys_of,
    known_at,
    may_hold_secret,
    near_keys,
    section_at,
    spec_keys,
)
from cartridge_forge.plugins.spec_files.yaml_source import Key, SourceLocation, show
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.secrets import HIDDEN
from cartridge_forge.protocols.spec.base import PATTERN_RULES, UNKNOWN_NAME
from cartridge_forge.protocols.spec.cartridge import TAG


@dataclass(frozen=True)
class SpecProblem:
    """Hold one broken rule. `place` orders problems; `text` is the whole line."""

    place: SourceLocation
    text: str


def fault(rule: str, got: Any, location: SourceLocation, key: Key, remedy: str) -> SpecProblem:
    """Return a problem from `rule` without its subject: "must be >= 1". `got` is shown as YAML."""
    got_text = got if got == HIDDEN else show(got)
    text = f"{_leaf(key)} {rule}: got {got_text} at {location} ({dotted(key)}); {remedy}"
    return SpecProblem(location, text)


def combined(faults: Sequence[SpecProblem]) -> SpecError:
    """Return all problems as one error, a line each: files by line number, then overrides."""
    ordered = sorted(
        dict.fromkeys(faults), key=lambda f: (f.place.line == 0, f.place.source, f.place.line)
    )
    if len(ordered) == 1:
        return SpecError(ordered[0].text)
    lines = "".join(f"\n  {f.text}" for f in ordered)
    return SpecError(f"{len(ordered)} faults in the spec:{lines}")


def faults_of(
    error: ValidationError, model: type[BaseModel], places: Mapping[Key, SourceLocation]
) -> list[SpecProblem]:
    """Return every problem of a failed validation of `model`; `places` must hold `()`."""
    errors = error.errors(include_url=False)
    unknown = [e["loc"][:-1] for e in errors if e["type"] == UNKNOWN_NAME]
    return [
        _fault_of(e, model, places)
        for e in errors
        if e["type"] == UNKNOWN_NAME or not any(e["loc"][: len(key)] == key for key in unknown)
    ]


def place_of(key: Key, places: Mapping[Key, SourceLocation]) -> SourceLocation:
    """Return where a key was written; for a key that was not, where its nearest parent was."""
    return places[written_key(key, places)]


def written_key(key: Key, places: Container[Key]) -> Key:
    """Return the key, or its nearest parent that was written; `()` where none was."""
    while key not in places:
        key = key[:-1]
    return key


def dotted(key: Key) -> str:
    """Return a key as text: `("evaluate", "arms", 2)` -> `"evaluate.arms[2]"`."""
    return "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in key).lstrip(".")


def unknown_key(key: Key, names: Sequence[str], location: SourceLocation) -> SpecProblem:
    """Return the problem of a key that is none of those `known` there."""
    leaf = str(key[-1])
    matches = difflib.get_close_matches(leaf, names, 1) or near_keys(leaf, _run_keys())
    hint = f"did you mean {matches[0]}? " if matches else ""
    return SpecProblem(
        location,
        f"unknown key {leaf} at {location} ({dotted(key)}); {hint}known here: {', '.join(names)}",
    )


def unknown_override(key: Key, location: SourceLocation) -> SpecProblem:
    """Return the problem of a `--set` whose first name is neither a mesh's nor a config's."""
    roots = (MESH_FILE.root, CONFIG_FILE.root)
    names = dict.fromkeys(name for root in roots for name, _ in keys_of(root))
    matches = near_keys(dotted(key), _run_keys()) or difflib.get_close_matches(
        str(key[0]), names, 1
    )
    hint = f"did you mean {matches[0]}? " if matches else ""
    return SpecProblem(
        location, f"unknown key {key[0]} at {location}; {hint}known: {', '.join(names)}"
    )


def _fault_of(
    error: ErrorDetails, model: type[BaseModel], places: Mapping[Key, SourceLocation]
) -> SpecProblem:
    key: Key = tuple(part for part in error["loc"] if not str(part).startswith(TAG))
    context: dict[str, Any] = error.get("ctx", {})
    kind = error["type"]
    key = key[:-1] if kind == UNKNOWN_NAME else key  # pydantic adds that the key is meant
    got = HIDDEN if may_hold_secret(model, key) else error["input"]
    if kind == "rule":
        if "key" in context:
            key = tuple(int(p) if p.isdigit() else p for p in context["key"].split("."))
        got = context.get("got", got)
        return fault(context["rule"], got, place_of(key, places), key, context["remedy"])
    location = place_of(key, places)
    former = getattr(section_at(model, key[:-1]), "removed", {}).get(key[-1]) if key else None
    if kind == "extra_forbidden" and former is not None:
        text = f"{key[-1]} is no key any more: got {show(got)} at {location} ({dotted(key)})"
        return SpecProblem(location, f"{text}; {former[1]}")
    if kind in ("extra_forbidden", UNKNOWN_NAME):
        return unknown_key(key, known_at(model, key[:-1]), location)
    if kind == "missing":
        leaf, parent = str(key[-1]), section_at(model, key[:-1])
        assert parent is not None, key
        what = parent.model_fields[leaf].description
        return SpecProblem(
            location,
            f"{leaf} must be given: missing at {location} ({dotted(key)}); add {leaf}: ({what})",
        )
    rule, remedy = _rule_of(kind, context, known_at(model, key), got, error["msg"])
    return fault(rule, got, location, key, remedy)


_RULES = {  # pydantic's error kinds -> (rule, remedy); {} is the bound that its context holds
    "greater_than_equal": ("must be >= {}", "set it to {} or more"),
    "greater_than": ("must be > {}", "set it above {}"),
    "less_than_equal": ("must be <= {}", "set it to {} or less"),
    "less_than": ("must be < {}", "set it below {}"),
    "int_type": ("must be a whole number", "write digits alone, without quotes"),
    "int_from_float": ("must be a whole number", "write digits alone, without quotes"),
    "float_type": ("must be a number", "write it without quotes"),
    "finite_number": ("must be a finite number", "write a number"),
    "bool_type": ("must be true or false", "write true or false"),
    "string_type": ("must be text", "put it in quotes"),
    "string_too_short": ("must not be empty", "write a value"),
    "tuple_type": ("must be a list", "write it as [a, b]"),
    "too_short": ("must hold at least one item", "list one"),
}


def _rule_of(
    kind: str, context: Mapping[str, Any], known: Sequence[str], got: Any, message: str
) -> tuple[str, str]:
    """Return (rule, remedy) of one of pydantic's errors."""
    if kind in _RULES:
        bound = next((f"{context[k]:g}" for k in ("ge", "gt", "le", "lt") if k in context), "")
        rule, remedy = _RULES[kind]
        return rule.format(bound), remedy.format(bound)
    if kind == "multiple_of":
        step = context["multiple_of"]
        return f"must be a multiple of {step}", f"round it to {step}, {2 * step}, ..."
    if kind in ("model_type", "dict_type") and known:
        return "must be a mapping of keys", f"it may hold {', '.join(known)}"
    if kind == "string_pattern_mismatch" and context["pattern"] in PATTERN_RULES:
        return PATTERN_RULES[context["pattern"]]
    if kind == "string_too_long":
        return f"must have at most {context['max_length']} characters", "shorten it"
    if kind == "literal_error":
        words = re.findall(r"'([^']*)'", context["expected"])
        matches = difflib.get_close_matches(str(got), words, 1)
        remedy = f"did you mean {matches[0]}?" if matches else "pick one of them"
        return f"must be one of {', '.join(words)}", remedy
    return f"is refused ({message})", "see its description in protocols/"


def _leaf(key: Key) -> str:
    """Return the last name with its index, if any: `"arms[2]"`."""
    return dotted(key).rsplit(".", 1)[-1]


def _run_keys() -> list[SpecKey]:
    return [*spec_keys(MESH_FILE), *spec_keys(CONFIG_FILE)]
