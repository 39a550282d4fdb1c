"""Keep the date that a run's chat template may write: with the run, and with its cartridges.

The templates of Llama 3, Granite 3, SmolLM3 and gpt-oss write the day into every conversation. A
run has one date from its beginning on, also where it is resumed days later, and whoever asks one of
its cartridges renders prompts of that date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from cartridge_forge.protocols.errors import CheckpointError
from cartridge_forge.protocols.files import write_atomically

CHAT = "chat.json"  # of a run directory
KEY = "chat_date"  # in the source of a cartridge


def write_date(run: Path, date: datetime) -> None:
    """Write the date of a run, to the second, without a time zone."""
    text = date.replace(tzinfo=None).isoformat(timespec="seconds")
    write_atomically(run / CHAT, json.dumps({"date": text}) + "\n")


def read_date(run: Path) -> datetime | None:
    """Return the date of a run; None for one of an older version. Raises CheckpointError for a
    damaged file."""
    file = run / CHAT
    try:
        return datetime.fromisoformat(json.loads(file.read_bytes())["date"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} has no date ({error!r}); restore it from a copy, or write the day on which "
            'the run began: {"date": "2026-07-26T00:00:00"}'
        ) from error


def source_of(date: datetime | None) -> dict[str, str]:
    """Return the entry of a cartridge's source that keeps a date; {} for none."""
    return {} if date is None else {KEY: date.isoformat(timespec="seconds")}


def date_of(source: Mapping[str, Any]) -> datetime | None:
    """Return the date that a cartridge's source keeps; None where it keeps none that can be
    read."""
    try:
        return datetime.fromisoformat(source[KEY])
    except (KeyError, TypeError, ValueError):
        return None
