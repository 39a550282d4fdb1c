"""Define the base of every spec section, how plug-ins add keys to one, its rule errors, and its
lists, paths and names.

A rule between two keys of a section is a validator of the later key, which sees those before it. A
broken rule states the requirement and the remedy; `plugins.spec_files.loading` adds the given value
and its location.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import ge, gt, le, lt
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from cartridge_forge.protocols.plugins import CORE, SHIPPED, Kind, known, optional


class SpecSection(BaseModel):
    """Serve as the base of every section: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False,
        hide_input_in_errors=True,  # it may be a secret in the wrong place
        defer_build=True,  # a plug-in subclasses a section, which then is never read itself
    )  # fmt: skip

    # Former keys: the default of each, which resolved specs of older runs have, and its remedy.
    removed: ClassVar[Mapping[str, tuple[Any, str]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not cls.removed.keys() & value.keys():
            return value
        defaults = {name: default for name, (default, _) in cls.removed.items()}
        return {k: v for k, v in value.items() if k not in defaults or v != defaults[k]}

    @classmethod
    def of(cls, section: SpecSection) -> Self:
        """Return the section with this class's keys: as it is where it has them, else completed
        with their defaults. A plug-in reads its own keys of a core's section by it:
        `EpisodesLearn.of(learn).episodes`."""
        if isinstance(section, cls):
            return section
        values = {}
        for name, field in cls.model_fields.items():
            if hasattr(section, name):
                value, kind = getattr(section, name), field.annotation
                if isinstance(kind, type) and issubclass(kind, SpecSection):
                    value = kind.of(value)
                values[name] = value
        return cls.model_validate(values)


class JoinedSection(SpecSection):
    """Serve as the base of a section of the core that plug-ins add keys to. A plug-in's subclass
    has the keys and their rules; `protocols.plugins` names it, under the kind `table`."""

    table: ClassVar[Kind]

    @classmethod
    def joined(cls, keys: Iterable[str] = ()) -> type[Self]:
        """Return the class with the keys of the shipped plug-ins that are installed here; of those
        of other packages too, where one of the `keys` is none of them."""
        shipped: type[Self] = joined_class(cls, False)
        return shipped if set(keys) <= shipped.model_fields.keys() else joined_class(cls, True)

    @classmethod
    def read(cls, value: Any) -> Self:
        """Return a mapping as a section with the keys of plug-ins, and such a section as it is.
        Raises pydantic's ValidationError."""
        if isinstance(value, cls):
            return value
        return cls.joined(value if isinstance(value, Mapping) else ()).model_validate(value)


@cache
def joined_class(core: Any, foreign: bool) -> Any:
    """Return a core's section with the keys of the shipped plug-ins, and of others if `foreign`."""
    names = known(core.table) if foreign else [
        name for plugin in (CORE, *SHIPPED) for name in getattr(plugin, core.table)
    ]  # fmt: skip
    added = [optional(core.table, name) for name in names]
    parts = [part for part in added if part is not None]
    bases = [p for p in parts if not any(o is not p and issubclass(o, p) for o in parts)] or [core]
    if len(bases) == 1:
        return bases[0]
    # Made here, and so pickled by its values: no module has it.
    attributes = {"__module__": __name__, "__reduce__": lambda s: (core.read, (s.model_dump(),))}
    return type(core)(core.__name__, tuple(bases), attributes)


def broken(rule: str, remedy: str, **context: Any) -> PydanticCustomError:
    """Return the error of a broken rule: `broken("must be < tokens (28)", "lower it")`.

    A rule between sections adds `key` (dotted, from the model's root) and `got`.
    """
    return PydanticCustomError(
        "rule",
        "{rule}; {remedy}",
        {"rule": rule, "remedy": remedy, **context},
    )


Rule = tuple[bool, str, str]  # whether it is broken, the rule with its dotted key first, the remedy


def _list_to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def repeated(values: Sequence[str]) -> str | None:
    """Return the alphabetically first value that is given twice; None where each is once."""
    return min((v for v in values if values.count(v) > 1), default=None)


def unique(values: tuple[str, ...]) -> tuple[str, ...]:
    if twice := repeated(values):
        raise broken("must list each item once", f"remove the second {twice}")
    return values


def bounded(key: str, sign: Literal["<", "<=", ">", ">="], other: str, remedy: str) -> Any:
    """Return a validator: `key` stands in the relation `sign` to `other`, an earlier key of its
    section; null stands in any. Errors write `other` as given: "train.steps" is the key `steps`."""
    holds = {"<": lt, "<=": le, ">": gt, ">=": ge}[sign]

    def check(value: Any, info: ValidationInfo) -> Any:
        bound = info.data.get(other.rpartition(".")[2])
        if value is not None and bound is not None and not holds(value, bound):
            bound_text = f"{bound:g}" if isinstance(bound, float) else bound
            raise broken(f"must be {sign} {other} ({bound_text})", remedy)
        return value

    return field_validator(key)(check)


AsTuple = BeforeValidator(_list_to_tuple)

Absolute = Callable[[str], str]  # a path, as written -> absolute, beside the file that names it


def _beside_its_file(path: str, sections: Sequence[BaseModel], absolute: Absolute) -> str:
    return absolute(path)


@dataclass(frozen=True)
class PathRule:
    """Mark a key as a path. `local(text, sections, absolute)` returns it as a resolved spec has it:
    `sections` are those around the key, the root first. A key that may hold another thing as well
    (a hub id, a URL, a name) has a rule of its own, which leaves such a text as it is."""

    local: Callable[[str, Sequence[BaseModel], Absolute], str] = _beside_its_file


LocalPath = Annotated[str, PathRule()]  # relative to the file that names it


@dataclass(frozen=True)
class ReadWith:
    """Mark a key or section as read only where `key`, of its section or dotted from the root, has
    one of the `values` (a list: holds one) or, without `values`, is not null, false, 0 or empty."""

    key: str
    values: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class KnownNames:
    """Mark a mapping of sections of one kind as one whose names are known. `shipped` has the
    meaning of each, `foreign` returns those of other packages' plug-ins, and `word` stands for a
    name in lists of keys: `roles.ROLE.threads`."""

    word: str
    shipped: Mapping[str, str]
    foreign: Callable[[], Collection[str]]

    def __contains__(self, name: object) -> bool:
        return name in self.shipped or name in self.foreign()

    def __iter__(self) -> Iterator[str]:
        yield from (*self.shipped, *self.foreign())


UNKNOWN_NAME = "unknown_name"


def unknown_name() -> PydanticCustomError:
    """Return the error of a name that is none of `KnownNames`."""
    return PydanticCustomError(UNKNOWN_NAME, "is not known")


# What a pattern asks for, by its text: (rule, remedy), as errors say it. A plug-in's module of
# patterns adds its own.
PATTERN_RULES: dict[str, tuple[str, str]] = {}
