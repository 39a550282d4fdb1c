"""The date of a run's prompts: with the run, and in the source of its cartridges."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from cartridge_forge.protocols.errors import CheckpointError
from cartridge_forge.protocols.records.run_files import (
    CHAT_FILE,
    date_of,
    read_date,
    source_of,
    write_date,
)


def test_a_date_is_kept_to_the_second(tmp_path: Path) -> None:
    write_date(tmp_path, datetime(2026, 7, 26, 23, 59, 59, 120_000, tzinfo=UTC))
    assert (tmp_path / CHAT_FILE).read_text() == '{"date": "2026-07-26T23:59:59"}\n'
    found = read_date(tmp_path)
    assert found == datetime(2026, 7, 26, 23, 59, 59)
    assert source_of(found) == {"chat_date": "2026-07-26T23:59:59"}
    assert date_of({"run": "r", **source_of(found)}) == found


def test_what_keeps_no_date(tmp_path: Path) -> None:
    assert read_date(tmp_path) is None
    assert source_of(None) == {}
    for source in ({}, {"chat_date": None}, {"chat_date": "soon"}):
        assert date_of(source) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"date": "soon"}', '{"date": 3}'])
def test_a_damaged_date_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / CHAT_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"chat.json has no date .* restore it from a copy"):
        read_date(tmp_path)
