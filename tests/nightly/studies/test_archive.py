"""Finished runs go into an archive, and pages are compared with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cartridge_forge.protocols.errors import DataError, SpecError
from cartridge_forge.protocols.files import REPOSITORY, iter_rows, json_lines
from cartridge_forge.protocols.records.answers import Answer, to_row
from studies import archive
from studies.archive import KeptRun
from studies.tables import pages, recorded

RUN = KeptRun("run", "", 0, {}, "forge-run x.yaml", "20261124T0-ab")


def finished(run: Path, status: str = "finished") -> Path:
    run.mkdir()
    (run / "results.json").write_text(json.dumps({"status": status}))
    (run / "spec.yaml").write_text(f"mesh:\n  config: {REPOSITORY}/configs/x.yaml\n")
    answer = Answer(
        id="0", fact="f", document="d", document_hash="0", question_hash="1", text="x", answer="x",
        right=1.0,
    )  # fmt: skip
    rows = [to_row(answer, "none", 0, sampled=s) for s in (False, True)]
    (run / "answers.jsonl").write_text(json_lines(rows))
    (run / "metrics.jsonl").write_text("")
    return run


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "HOME", tmp_path / "studies")


def test_a_run_is_kept_and_equal_results_are_equal_bytes(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    path = archive.keep("x", [(RUN, run)])
    first = path.read_bytes()
    assert archive.keep("x", [(RUN, run)]).read_bytes() == first
    files = archive.members("x")
    assert archive.pack("x", dict(reversed(files.items()))).read_bytes() == first
    assert list(archive.rows("x", "run/answers.jsonl")) == list(iter_rows(run / "answers.jsonl"))
    assert archive.text("x", "run/spec.yaml") == "mesh:\n  config: configs/x.yaml\n"
    assert archive.runs("x") == [RUN]
    assert archive.runs("x", "another sweep") == []
    assert [p.name for p in path.parent.iterdir()] == ["results.zip"]


def test_a_run_of_the_same_name_is_replaced_with_all_of_its_files(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    (run / "eval.json").write_text("{}")
    archive.keep("x", [(RUN, run)])
    archive.pack("x", archive.members("x") | {"other.json": b"{}"})
    archive.keep("x", [(RUN, finished(tmp_path / "again"))])
    assert not archive.has_member("x", "run/eval.json")
    assert archive.document("x", "other.json") == {}
    assert len(archive.runs("x")) == 1


def test_a_run_that_did_not_finish_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is stopped: only finished runs are kept"):
        archive.keep("x", [(RUN, finished(tmp_path / "run", "stopped"))])
    with pytest.raises(SpecError, match="name a finished run"):
        archive.keep("x", [(RUN, tmp_path)])
    assert not archive.archive_path("x").exists()


def test_a_member_that_is_not_there_is_told_with_its_remedy() -> None:
    with pytest.raises(
        DataError, match=r"has no run/answers\.jsonl: see `python -m studies list x`"
    ):
        archive.text("x", "run/answers.jsonl")


def test_a_changed_number_is_named_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = lambda study, name: (["", "n"], [["a", "5%"]])  # noqa: E731  (a table of one row)
    monkeypatch.setattr(recorded, "TABLES", {"one": one})
    page = tmp_path / "README.md"
    page.write_text("text\n\n<!-- record: x one run -->\n| | n |\n|---|---|\n| a | 4% |\n\nend\n")
    (table,) = pages.recorded(tmp_path)
    (fault,) = pages.differing(table)
    assert fault == f"{page}:6: the row is '| a | 4% |', the record gives '| a | 5% |'"
    assert pages.write(tmp_path) == ["README.md"]
    (table,) = pages.recorded(tmp_path)
    assert pages.differing(table) == []
    names = ("README.md",)
    assert pages.unmarked(tmp_path, names) == []
    page.write_text(page.read_text() + "\n| a |\n|---|\n| 1.5 |\n| 2.5 |\n| 30% |\n")
    (fault,) = pages.unmarked(tmp_path, names)
    assert "README.md:10: a table without a mark" in fault
    page.write_text(
        page.read_text().replace("| a |\n|---|\n| 1.5", "<!-- no record -->\n| a |\n|---|\n| 1.5")
    )
    (fault,) = pages.unmarked(tmp_path, names)
    assert "does not tell its readers" in fault
