"""What doubles between prompts and questions do to a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cartridge_forge.plugins.documents.near_duplicates import LocatedText, PromptOverlap, clean
from cartridge_forge.protocols.errors import DataError

FOUND = [
    PromptOverlap(
        "exact",
        1.0,
        LocatedText("d", f"text {i}", f"rows: {i}"),
        LocatedText("d", "text", f"q: {i}"),
    )
    for i in range(7)
]


def test_failing_names_the_first_few_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "contamination.jsonl"
    with pytest.raises(DataError) as error:
        clean(FOUND, "fail", file)
    told = str(error.value)
    assert told.startswith("7 training prompts double evaluation questions")
    assert all((f"q: {i}" in told) == (i < 5) for i in range(7))
    assert "and 2 more" in told
    assert str(file) in told
    assert error.value.exit_code == 2
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["training"]["place"] for row in rows] == [f"rows: {i}" for i in range(7)]


def test_warning_writes_the_file_alone_and_nothing_removes_it(tmp_path: Path) -> None:
    file = tmp_path / "contamination.jsonl"
    clean(FOUND, "warn", file)
    assert len(file.read_text().splitlines()) == 7
    clean([], "fail", file)
    assert not file.exists()
