"""Define the base of every spec section, its rule errors, and its lists, paths and names.

A rule between two keys of a section is a validator of the later key, which sees those before it. A
broken rule states the requirement and the remedy; `protocols.spec.loading` adds the given value and
its location.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import ge, gt, le, lt
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class SpecSection(BaseModel):
    """Serve as the base of every section: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False,
        hide_input_in_errors=True,  # it may be a secret in the wrong place
    )  # fmt: skip


def broken(rule: str, remedy: str, **context: Any) -> PydanticCustomError:
    """Return the error of a broken rule: `broken("must be < tokens (28)", "lower it")`.

    A rule between sections adds `key` (dotted, from the model's root) and `got`.
    """
    return PydanticCustomError(
        "rule",
        "{rule}; {remedy}",
        {"rule": rule, "remedy": remedy, **context},
    )


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
