"""A ledger of one teacher, and a call that it may reserve."""

from __future__ import annotations

from pathlib import Path

from replay_setup import a_spec, a_teacher

from cartridge_forge.plugins.replay.budget import TeacherCall
from cartridge_forge.plugins.replay.ledger import SpendLedger
from cartridge_forge.plugins.replay.panel import limits_of

SPEC = a_spec(a_teacher("a", "http://127.0.0.1:1"))
CALL = TeacherCall("k", "a", "run", 5_000)


def opened(path: Path) -> SpendLedger:
    """Return the ledger at a path."""
    return SpendLedger(path, limits_of(SPEC), lock_timeout_s=5.0)
