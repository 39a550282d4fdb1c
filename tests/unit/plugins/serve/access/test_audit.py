"""The audit log cannot be grown without bound by who has no key."""

from __future__ import annotations

import json
from pathlib import Path

from cartridge_forge.plugins.serve.access.audit import NOBODY, AuditLog


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_refusals_of_nobody_are_written_at_a_bounded_rate_and_counted(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "audit.jsonl"
    audit = AuditLog(str(path), False, clock)
    for _ in range(5_000):
        audit.refused(NOBODY, "10.0.0.9", path="/v1/models", code="invalid_api_key")
    assert len(path.read_bytes().splitlines()) == 60
    audit.refused("ward", "10.0.0.7", path="/v1/chat/completions", code="cartridge_not_permitted")
    audit.write("asked", "ward", "10.0.0.7", request="chatcmpl-1")
    clock.now += 12.0  # two more, at 10 a minute
    for _ in range(5):
        audit.refused(NOBODY, "10.0.0.9", path="/v1/models", code="invalid_api_key")
    audit.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    told = [(r["event"], r["key"], r.get("unwritten")) for r in rows[60:]]
    assert told == [
        ("refused", "ward", 4_940),
        ("asked", "ward", None),
        ("refused", NOBODY, None),
        ("refused", NOBODY, None),
        ("refused", NOBODY, 3),
    ]


def test_a_row_of_nobody_is_short_whatever_was_asked(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(str(path), False)
    audit.refused(NOBODY, "f" * 45, path="/" * 200, code="unknown_origin")
    audit.close()
    assert len(path.read_bytes()) < 500
