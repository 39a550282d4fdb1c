"""Differences of times are durations, whatever the host's clock does."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from cartridge_forge.protocols.files import steady_time


def test_a_clock_that_is_set_back_ends_no_span_before_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, passed = steady_time(), time.monotonic()
    assert abs(before - time.time()) < 3600, "seconds since the epoch"
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: passed + 2.5)
    assert steady_time() - before == pytest.approx(2.5, abs=0.5)


# What reads the clock that can be set, and why no wait or limit goes wrong by it.
WALL_CLOCK = {
    "learning/model/verdicts.py": "an age of files; a clock that was set back keeps no note",
    "protocols/files.py": "once, when the process begins",
    "plugins/library/store.py": "the age of what was left behind, and is in nobody's use",
    "plugins/serve/handler.py": "a field of a reply",
    "plugins/serve/routes/models.py": "a field of a reply",
    "plugins/watch/telemetry/tensorboard.py": "the times of records",
    "plugins/replay/ledger.py": "the times of records; an age is bounded by the monotonic clock",
    "plugins/replay/panel.py": "the time of a record",
}
ROOMS = (
    "actors", "cartridge_forge", "forge_run", "learning", "plugins", "protocols", "services",
    "training",
)  # fmt: skip


def test_nothing_else_waits_by_the_clock_that_can_be_set() -> None:
    root = Path(__file__).resolve().parents[3]
    files = {p for room in ROOMS for p in (root / room).rglob("*.py")}
    found = {
        str(path.relative_to(root))
        for path in files
        if re.search(r"\btime\.(time|time_ns|gmtime|localtime)\b", path.read_text())
    }
    assert found == set(WALL_CLOCK)
