"""`forge make`: the names that its cartridges have in the library."""

from __future__ import annotations

import pytest

from cartridge_forge.forge_run.commands.make import _name_of, library_names
from cartridge_forge.plugins.documents.reading import ReadResult, UserDocument
from cartridge_forge.protocols.errors import DataError


def of_names(*names: str) -> ReadResult:
    return ReadResult(tuple(UserDocument(n, f"{n}.txt", "text", "0", "utf-8") for n in names))


def test_names_in_the_library() -> None:
    assert library_names("book", of_names("one")) == {"one": "book"}
    assert library_names("book", of_names("a", "b")) == {"a": "book.a", "b": "book.b"}
    with pytest.raises(DataError, match="give a short one by --name"):
        library_names("x" * 40, of_names("a" * 40, "b"))
    assert _name_of("/some/My old notes (2026)/") == "My-old-notes-2"
    assert _name_of("report.final.md") == "report-final"
    assert _name_of("/") == "documents"
