"""Write and read teacher-replay records as JSON lines; a record reads back equal.

{"schema": 1, "record": "state", "state_hash": "9f2c...", "trace_id": "episode/12/3", ...}
{"schema": 1, "record": "verdict", "state_hash": "9f2c...", "reason": "pair", "votes": [...]}
{"schema": 1, "record": "pair", "state_hash": "9f2c...", "chosen": "{...}", ...}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from cartridge_forge.plugins.chat.messages import (
    PanelVerdict,
    PreferenceActions,
    ReplayState,
    TeacherVote,
)
from cartridge_forge.plugins.replay.prompts import state_hash
from cartridge_forge.protocols.errors import DataError

SCHEMA = 1

Record = ReplayState | TeacherVote | PanelVerdict | PreferenceActions
KINDS: dict[str, type[Record]] = {
    "state": ReplayState, "vote": TeacherVote, "verdict": PanelVerdict, "pair": PreferenceActions,
}  # fmt: skip
_RECORD = {kind: TypeAdapter(record) for kind, record in KINDS.items()}
_KIND = {record: kind for kind, record in KINDS.items()}


def to_row(record: Record) -> dict[str, Any]:
    """Return the record as plain JSON; a state has its hash added, by which other records refer to
    it."""
    kind = _KIND[type(record)]
    row = {"schema": SCHEMA, "record": kind}
    if isinstance(record, ReplayState):
        row["state_hash"] = state_hash(record)
    return row | _RECORD[kind].dump_python(record, mode="json")


def from_row(row: Mapping[str, Any]) -> Record:
    """Return the record of a row that `to_row` made. Raises DataError for any other row."""
    try:
        if row["schema"] != SCHEMA:
            raise ValueError(f"schema {row['schema']}")
        record: Record = _RECORD[row["record"]].validate_python(dict(row))
    except (KeyError, ValueError) as error:
        raise DataError(
            f"a row of the teacher replay, schema {SCHEMA}, was expected: got another "
            f"({str(error).splitlines()[0]}); read it with the version that wrote it"
        ) from error
    return record
