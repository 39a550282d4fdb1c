"""`forge make`: mistakes answered before anything is loaded, and names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from documents.reading import ReadResult, UserDocument
from forge_run.cli import forge
from forge_run.commands.make import _name_of, library_names
from protocols.errors import DataError


def of_names(*names: str) -> ReadResult:
    return ReadResult(tuple(UserDocument(n, f"{n}.txt", "text", "0", "utf-8") for n in names))


def test_mistakes_are_told_with_their_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_HOME", str(tmp_path / "home"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("The harbour keeps nine boats.")
    for words, said in (
        (["missing"], "there is no file or folder"),
        (["empty"], "no document in"),
        (["texts"], "no model 'smollm2-135m'"),
        (["texts"], "add it with forge models add smollm2-135m"),
        (["texts", "--minutes", "0"], "--minutes must be > 0 and --ratio > 1: got 0 and None"),
        (["texts", "--ratio", "1"], "got 20 and 1.0"),
        (["texts", "--name", "my book"], "'my book' is no cartridge's name"),
    ):
        assert forge(["make", str(tmp_path / words[0]), *words[1:]]) == 2
        assert said in capsys.readouterr().err


def test_a_mistake_is_answered_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from forge_run.cli import forge; forge(['make', sys.argv[1]]); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 0


def test_names_in_the_library() -> None:
    assert library_names("book", of_names("one")) == {"one": "book"}
    assert library_names("book", of_names("a", "b")) == {"a": "book.a", "b": "book.b"}
    with pytest.raises(DataError, match="give a short one by --name"):
        library_names("x" * 40, of_names("a" * 40, "b"))
    assert _name_of("/some/My old notes (2026)/") == "My-old-notes-2"
    assert _name_of("report.final.md") == "report-final"
    assert _name_of("/") == "documents"
