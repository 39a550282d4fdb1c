"""Normalize actions, so that equal actions in different notation become the same string.

    ToolAction("read_value", {"note": "3", "name": " hemoglobin"})   with note declared an integer
        {"arguments":{"name":"hemoglobin","note":3},"tool":"read_value"}
    OptionAction("b) insulin")    {"choice":"B"}
    TextAction("halve  the dose") {"text":"halve the dose"}

Keys are sorted. Strings are NFC with whitespace folded (case is kept: ids may depend on it). Whole
numbers lose their fraction. A scalar is converted to the type that the tool declares where that
loses nothing. An optional argument that is null is left out.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from cartridge_forge.plugins.chat.messages import (
    Action,
    AgentTool,
    OptionAction,
    ReplayState,
    TextAction,
    ToolAction,
)
from cartridge_forge.protocols.errors import DataError

NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")  # JSON's own
LONGEST_NUMBER = 24  # characters; a longer string of digits is an identifier
LETTERED = re.compile(r"\(?([A-Za-z])(?:[).:]+(?:\s+(.*))?)?", re.DOTALL)


def canonical(action: Action, state: ReplayState) -> str:
    """Return the action's canonical string, whether or not the action is valid: see `fault`. Raises
    DataError for arguments that are not JSON (NaN, a Python object)."""
    match action:
        case ToolAction(tool, arguments):
            declared = next((t for t in state.tools if t.name == fold(tool)), None)
            plain: dict[str, Any] = {
                "tool": fold(tool),
                "arguments": _arguments(arguments, declared),
            }
        case OptionAction(option):
            plain = {"choice": letter(option, state.options) or fold(option)}
        case TextAction(text):
            plain = {"text": fold(text)}
    return dense(plain)


def action_of(text: str) -> Action:
    """Return the action of a canonical string: the inverse of `canonical`."""
    plain = json.loads(text)
    if "tool" in plain:
        return ToolAction(plain["tool"], plain["arguments"])
    return OptionAction(plain["choice"]) if "choice" in plain else TextAction(plain["text"])


def fault(action: Action, state: ReplayState) -> str:
    """Return why the action is invalid in this state; "" where it is valid. A teacher that names an
    unknown tool has not voted. The student's own action may be invalid: the preference pair is to
    train it away."""
    match action:
        case ToolAction(tool, arguments):
            declared = next((t for t in state.tools if t.name == fold(tool)), None)
            if declared is None:
                return "unknown tool"
            return _argument_fault(arguments, declared.parameters)
        case OptionAction(option):
            return "" if letter(option, state.options) else "not one of the options"
        case TextAction(text):
            if state.options:
                return "free text where an option is asked for"
            return "" if fold(text) else "empty text"


def letter(option: str, options: Sequence[str]) -> str | None:
    """Return the letter of the option meant: by its words, its letter, or both if they agree; else
    None."""
    folded = fold(option).casefold()
    words = [fold(o).casefold() for o in options]
    if words.count(folded) == 1:
        return chr(ord("A") + words.index(folded))
    match = LETTERED.fullmatch(fold(option))
    if not match:
        return None
    index = ord(match[1].upper()) - ord("A")
    if index >= len(options) or (match[2] and match[2].casefold() != words[index]):
        return None
    return match[1].upper()


def fold(text: str) -> str:
    """Return the text in NFC, with every run of whitespace as one space and none at the ends."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def dense(plain: Any) -> str:
    """Return JSON with sorted keys and no spaces. Raises DataError for values that JSON cannot
    express."""
    try:
        return json.dumps(
            plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
    except (TypeError, ValueError) as error:
        raise DataError(f"an action must be JSON: {error}; leave out what is not") from error


def _arguments(arguments: Mapping[str, Any], tool: AgentTool | None) -> dict[str, Any]:
    schema = tool.parameters if tool else {}
    properties = schema.get("properties", {})
    plain = {fold(k): _normal(v, properties.get(fold(k), {})) for k, v in arguments.items()}
    required = schema.get("required", ())
    return {k: v for k, v in plain.items() if v is not None or k in required}


def _normal(value: Any, schema: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        inner = schema.get("properties", {})
        return {fold(str(k)): _normal(v, inner.get(str(k), {})) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_normal(v, schema.get("items", {})) for v in value]
    if isinstance(value, str):
        value = fold(value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise DataError(f"an argument must be a JSON value, got {value}; leave it out")
        value = _whole(value)
    return _declared(value, schema.get("type"))


def _declared(value: Any, kind: Any) -> Any:
    """Convert a scalar to the type that the tool declares, where nothing is lost."""
    if kind in ("integer", "number") and isinstance(value, str) and _is_number(value):
        number = json.loads(value)
        return _whole(number) if isinstance(number, float) else number
    if kind == "boolean" and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if kind == "string" and isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value)
    return value


def _is_number(text: str) -> bool:
    return len(text) <= LONGEST_NUMBER and bool(NUMBER.fullmatch(text))


def _whole(number: float) -> int | float:
    return int(number) if math.isfinite(number) and number.is_integer() else number


def _argument_fault(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    names = {fold(k) for k, v in arguments.items() if v is not None}
    if missing := sorted(set(schema.get("required", ())) - names):
        return f"missing argument {missing[0]}"
    properties = schema.get("properties")
    if properties is not None and (unknown := sorted(names - set(properties))):
        return f"unknown argument {unknown[0]}"
    return ""
