"""Define the base of every spec section, its rule errors and its list types.

A rule between two keys of a section is a validator of the later key, which sees those before it. A
broken rule states the requirement and the remedy; `protocols.spec.loading` adds the given value and
its location.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError


class SpecSection(BaseModel):
    """Serve as the base of every section: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False
    )


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


def unique(values: tuple[str, ...]) -> tuple[str, ...]:
    twice = sorted({v for v in values if values.count(v) > 1})
    if twice:
        raise broken("must list each item once", f"remove the second {twice[0]}")
    return values


AsTuple = BeforeValidator(_list_to_tuple)
