"""The words beside a cartridge: kept exactly, and checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cartridge_forge.plugins.library.terms import read_terms, write_terms
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.records.run_files import TERMS

WORDS = {"salt": [{"größe": 2, "a": 1}, {"tide": 3}], "reef": [{}]}


def test_terms_come_back_as_written(tmp_path: Path) -> None:
    file = tmp_path / TERMS
    write_terms(file, WORDS)
    assert read_terms(file) == WORDS
    assert read_terms(tmp_path / "none") == {}
    write_terms(tmp_path / "again", dict(reversed(WORDS.items())))
    assert (tmp_path / "again").read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "terms": {}, "sha256": "x"}']
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / TERMS
    file.write_text(content)
    with pytest.raises(DataError, match=r"no readable words .*forge cartridges words"):
        read_terms(file)


def test_a_count_that_was_changed_is_found(tmp_path: Path) -> None:
    file = tmp_path / TERMS
    write_terms(file, WORDS)
    plain = json.loads(file.read_text())
    plain["terms"]["salt"][1]["tide"] = 4
    file.write_text(json.dumps(plain))
    with pytest.raises(DataError, match="its own checksum"):
        read_terms(file)
