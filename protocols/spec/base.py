"""What every section of a spec is made of: its base, its broken rules, its lists.

Rules between two keys of a section stand on the later key, which may look at those before it. A
broken rule says what is required and how to meet it; `protocols.spec.loading` adds what was given
and where.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError


class SpecSection(BaseModel):
    """Base of every section: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False
    )


def broken(rule: str, remedy: str, **context: Any) -> PydanticCustomError:
    """A broken rule: `broken("must be < tokens (28)", "lower it")`.

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
