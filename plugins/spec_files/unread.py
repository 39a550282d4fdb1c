"""Refuse the keys of a spec file that nothing reads, as other keys of it choose: those of another
recipe, source of data, loss channel or engine.

    objective: {w_doc: 1, grpo: {kl: 0.1}}     w_rl is 0: nothing reads grpo, and its kl is refused
    --set objective.w_rl=0                     over a file with both: its grpo is left out

A key says what it is read with by `protocols.spec.base.ReadWith`. Refused is a value other than the
default, unless what chooses was written later, by an overlay or an override: it then drops the key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cartridge_forge.plugins.spec_files.errors import (
    SpecProblem,
    dotted,
    fault,
    place_of,
    written_key,
)
from cartridge_forge.plugins.spec_files.keys import may_hold_secret, values_text
from cartridge_forge.plugins.spec_files.yaml_source import Key, SourceLocation, show
from cartridge_forge.protocols.plugins import SHIPPED
from cartridge_forge.protocols.secrets import HIDDEN
from cartridge_forge.protocols.spec.base import ReadWith

Section = TypeVar("Section", bound=BaseModel)
# Which keys of the others' a recipe of another package reads is not known: all may be given.
SHIPPED_RECIPES = {name for plugin in SHIPPED for name in plugin.recipes}


@dataclass(frozen=True)
class Unmet:
    """Hold a condition that is not met: the `key` that decides, its value, and the mark. A property
    of the root, such as `recipe`, is no key."""

    key: Key
    got: Any
    mark: ReadWith
    is_key: bool

    @property
    def rule(self) -> str:
        chosen = f"{dotted(self.key)} {values_text(self.mark)}".rstrip()
        got = self.got if isinstance(self.got, str) else show(self.got)
        return f"is read with {chosen} alone, and {dotted(self.key)} is {got}"

    @property
    def remedy(self) -> str:
        if not self.is_key:
            return "remove it"
        first = next(iter(self.mark.values), None)
        value = "" if first is None else f": {first}"
        return f"remove it, or set {dotted(self.key)}{value}"


def without_unread(
    root: Section, places: Mapping[Key, SourceLocation] | None = None
) -> tuple[Section, list[SpecProblem]]:
    """Return the spec with the default of each key that is not read with what the other keys
    choose, and a problem for each that must not stand there; without `places` there is none."""
    unread = list(_set_in_vain(root, root, (), ()))
    problems = [] if places is None else list(_problems(root, unread, places))
    return _with_defaults(root, [key for key, _, _ in unread]), problems


def _problems(
    root: BaseModel,
    unread: Sequence[tuple[Key, Any, tuple[Unmet, ...]]],
    places: Mapping[Key, SourceLocation],
) -> Iterator[SpecProblem]:
    """Yield a problem for each key that is not read, but where what chooses was written later."""
    order = {key: number for number, key in enumerate(places)}  # as it was written

    def is_later(key: Key, than: Key) -> bool:
        one, other = places[key], places[than]
        return order[key] > order[than] and not (one.line > 0 and one.source == other.source)

    def is_dropped(key: Key, condition: Unmet) -> bool:
        deciding = getattr(root, "choices", {}).get(dotted(condition.key))
        keys = [condition.key] if deciding is None else [tuple(k.split(".")) for k in deciding]
        choices = (written_key(choice, order) for choice in keys)
        return any(choice and is_later(choice, written_key(key, order)) for choice in choices)

    for key, value, conditions in unread:
        if not any(is_dropped(key, condition) for condition in conditions):
            condition, location = conditions[0], place_of(key, places)
            got = value.model_dump() if isinstance(value, BaseModel) else value
            got = HIDDEN if may_hold_secret(type(root), key) else got
            yield fault(condition.rule, got, location, key, condition.remedy)


def _with_defaults(value: Any, keys: Sequence[Key]) -> Any:
    """Return a section, or a list or mapping of them, with the defaults of these keys below it."""

    def below(name: str | int) -> list[Key]:
        return [key[1:] for key in keys if key[0] == name]

    if not keys:
        return value
    if isinstance(value, tuple):
        return tuple(_with_defaults(item, below(index)) for index, item in enumerate(value))
    if isinstance(value, Mapping):
        return {name: _with_defaults(item, below(name)) for name, item in value.items()}
    changed = {}
    for name, field in type(value).model_fields.items():
        if inner := below(field.alias or name):
            changed[name] = (
                _default(field) if () in inner else _with_defaults(getattr(value, name), inner)
            )
    return value.model_copy(update=changed)


def _set_in_vain(
    root: BaseModel, section: BaseModel, key: Key, outer: tuple[Unmet, ...]
) -> Iterator[tuple[Key, Any, tuple[Unmet, ...]]]:
    """Yield each key below a section that is not its default, with its conditions that are not
    met, if there are any."""
    for name, field in type(section).model_fields.items():
        value, below = getattr(section, name), (*key, field.alias or name)
        conditions = (*outer, *_unmet(root, section, key, field))
        if conditions and not isinstance(value, BaseModel):
            if not field.is_required() and value != _default(field):
                yield below, value, conditions
        elif conditions and not isinstance(_default(field), BaseModel):
            yield below, value, conditions
        else:
            for inner, where in _sections(value, below):
                yield from _set_in_vain(root, inner, where, conditions)


def _default(field: FieldInfo) -> Any:
    is_required = field.is_required()
    return None if is_required else field.get_default(call_default_factory=True, validated_data={})


def _sections(value: Any, key: Key) -> Iterator[tuple[BaseModel, Key]]:
    """Yield the sections that a value is or holds, each with its key."""
    if isinstance(value, BaseModel):
        yield value, key
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _sections(item, (*key, name))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _sections(item, (*key, index))


def _unmet(root: BaseModel, section: BaseModel, key: Key, field: FieldInfo) -> Iterator[Unmet]:
    for mark in field.metadata:
        if not isinstance(mark, ReadWith):
            continue
        names = mark.key.split(".")
        of_section = hasattr(section, names[0])
        got = attrgetter(mark.key)(section if of_section else root)
        items = got if isinstance(got, tuple) else (got,)
        is_met = any(item in mark.values for item in items) if mark.values else bool(got)
        is_met = is_met or (mark.key == "recipe" and got not in SHIPPED_RECIPES)
        if not is_met:
            owner, below = (section, key) if of_section else (root, ())
            for name in names[:-1]:
                owner = getattr(owner, name)
            is_key = names[-1] in type(owner).model_fields
            yield Unmet((*below, *names), got, mark, is_key)
