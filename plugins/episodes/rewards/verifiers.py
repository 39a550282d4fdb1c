"""Verify the last text of an episode: by its answer, a pattern or a JSON schema.

Each function gives 1 or 0; None where the episode's row has no answer to compare with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from cartridge_forge.plugins.strategies.answers.extract import Form, extract, same_answer
from cartridge_forge.protocols.errors import DataError

SCHEMA_REMEDY = "run `pip install -e '.[rewards]'`"
Verify = Callable[[str, Any], float | None]  # of the last text and the row's answer


def verifier_of(name: str, options: Mapping[str, Any]) -> Verify:
    """Return the verifier of a spec's reward. Raises DataError for a schema that is none, and where
    jsonschema is not installed."""
    if name == "regex":
        return partial(_found, re.compile(options["pattern"], re.DOTALL))
    if name == "json_schema":
        return partial(_fits, _validator(options["json_schema"]))
    usual: dict[str, Form] = {"exact": "general", "math": "math"}
    form: Form = options["form"] or usual[name]
    return partial(_equal, form, "math" if name == "math" else form)


def _equal(form: Form, compared: Form, text: str, answer: Any) -> float | None:
    if answer is None:
        return None
    answer_given = extract(text, form)
    return float(
        answer_given is not None and same_answer(answer_given, str(answer).strip(), compared)
    )


def _found(pattern: re.Pattern[str], text: str, answer: Any) -> float:
    return float(pattern.search(text) is not None)


def _validator(schema: Mapping[str, Any]) -> Any:
    try:
        from jsonschema import exceptions, validators
    except ImportError:
        raise DataError(f"json_schema needs jsonschema; {SCHEMA_REMEDY}") from None
    kind = validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except exceptions.SchemaError as error:
        raise DataError(f"json_schema is no JSON schema: {error.message}; correct it") from None
    return kind(schema)


def _fits(validator: Any, text: str, answer: Any) -> float:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return 0.0
    return float(validator.is_valid(value))
