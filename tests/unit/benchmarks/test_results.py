"""The tables of README.md and docs/ are those of the raw results that are kept."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import records, tables
from benchmarks.results.corpus_tables import seeds, shared_facts
from benchmarks.results.study_tables import between, collapses, over_reference
from protocols.errors import SpecError
from protocols.files import REPOSITORY, iter_rows, json_lines
from protocols.records.answers import Answer, to_row

RECORDED = [
    (name, one.line, one.argument)
    for name in tables.PAGES
    for one in tables.tables_of(REPOSITORY / name)
    if one.kind == "record"
]


@pytest.mark.parametrize(("page", "line", "argument"), RECORDED)
def test_every_row_of_a_recorded_table_is_that_of_its_record(
    page: str, line: int, argument: str
) -> None:
    (shown,) = [one for one in tables.tables_of(REPOSITORY / page) if one.line == line]
    for row, wanted in zip(shown.lines, tables.made(argument), strict=True):
        assert row == wanted


def test_no_table_of_results_is_without_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are compared above, so they are not made again."""
    shown = {o.argument: o.lines for n in tables.PAGES for o in tables.tables_of(REPOSITORY / n)}
    monkeypatch.setattr(tables, "made", shown.__getitem__)
    assert len(RECORDED) >= 4
    assert tables.faults() == []


def test_the_records_are_small_and_name_no_machine() -> None:
    files = [f for f in records.HOME.rglob("*") if f.is_file() and f.suffix != ".pyc"]
    assert sum(f.stat().st_size for f in files) < records.MOST_BYTES
    for folder in {f.parent for f in files if f.name == "source.json"}:
        for file in folder.glob("*.yaml"):
            assert ": /" not in file.read_text(), file


def test_the_record_of_the_main_run_agrees_with_the_run_itself() -> None:
    """Accuracy recomputed from answers is what the run wrote into its results."""
    arms = records.whole("longhealth", "results.json")["arms"]
    for arm, result in arms.items():
        for sampled, measured in ((False, result), (True, result["sampled"])):
            right, n, unread = tables._counts("longhealth", arm, sampled=sampled)
            assert (right / n, n) == (measured["accuracy"], measured["n"])
            assert unread == measured["parse_failures"]


def finished(run: Path, right: float = 1.0) -> Path:
    run.mkdir()
    (run / "results.json").write_text(json.dumps({"status": "finished"}))
    (run / "spec.yaml").write_text(f"mesh:\n  config: {REPOSITORY}/configs/x.yaml\n")
    answer = Answer(
        id="0", fact="f", document="d", document_hash="0", question_hash="1", text="x", answer="x",
        right=right,
    )  # fmt: skip
    rows = [to_row(answer, "none", 0, sampled=s) for s in (False, True)]
    (run / "answers.jsonl").write_text(json_lines(rows))
    (run / "metrics.jsonl").write_text("")
    return run


def test_a_run_is_collected_and_a_changed_number_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished(tmp_path / "run")
    home = tmp_path / "kept"
    folder = records.collect(run, "x", "forge-run x.yaml", home)
    first = (folder / "answers.jsonl.gz").read_bytes()
    assert records.collect(run, "x", "forge-run x.yaml", home) == folder
    assert (folder / "answers.jsonl.gz").read_bytes() == first
    assert list(records.rows("x", "answers.jsonl", home)) == list(iter_rows(run / "answers.jsonl"))
    assert (folder / "spec.yaml").read_text() == "mesh:\n  config: configs/x.yaml\n"

    monkeypatch.setattr(tables, "PAGES", ("page.md",))
    monkeypatch.setitem(tables.TABLES, "one", lambda record: tables.table(["", "n"], [["a", "5%"]]))
    page = tmp_path / "page.md"
    page.write_text("text\n\n<!-- record: x one -->\n| | n |\n|---|---|\n| a | 4% |\n\nend\n")
    (fault,) = tables.faults(tmp_path)
    assert fault == "page.md:4: row 2 is '| a | 4% |', the record gives '| a | 5% |'"
    assert tables.write(tmp_path) == ["page.md"]
    assert tables.faults(tmp_path) == []
    page.write_text(page.read_text() + "\n| a |\n|---|\n| 1.5 |\n| 2.5 |\n| 30% |\n")
    (fault,) = tables.faults(tmp_path)
    assert "page.md:10: a table without a mark" in fault
    page.write_text(
        page.read_text().replace("| a |\n|---|\n| 1.5", "<!-- no record -->\n| a |\n|---|\n| 1.5")
    )
    (fault,) = tables.faults(tmp_path)
    assert "does not tell its readers" in fault


def test_a_run_that_did_not_finish_is_refused(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    (run / "results.json").write_text(json.dumps({"status": "stopped"}))
    with pytest.raises(SpecError, match="is stopped: only finished runs are kept"):
        records.collect(run, "x", "", tmp_path)
    with pytest.raises(SpecError, match="name a finished run"):
        records.collect(tmp_path, "x", "", tmp_path)


def answered(document: str, fact: str, expected: str, said: str, arm: str = "on_policy") -> Any:
    text = f"the chart says {fact} {said}. the answer is {said}."
    return {
        "arm": arm, "sampled": False, "fact": fact, "document": document, "expected": expected,
        "text": text, "right": float(said == expected),
    }  # fmt: skip


def test_answers_are_counted_by_the_charts_that_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sodium is in two charts, where b gets a's value; both charts of the ward say the same."""
    kept = [
        answered("a", "sodium", "41", "41"), answered("b", "sodium", "52", "41"),
        answered("a", "ward", "east", "east"), answered("b", "ward", "east", "west"),
        answered("a", "surgeon", "weber", "weber"), answered("a", "surgeon", "weber", "xu"),
        answered("a", "surgeon", "weber", "xu", arm="none"),
    ]  # fmt: skip
    monkeypatch.setattr(records, "rows", lambda name, file: iter(kept))
    heads, body = shared_facts("one,two")
    assert heads[3:] == ["one: right", "one: another chart's", "two: right", "two: another chart's"]
    one, two = body
    assert one[:3] == ["1", "2", "100.0%"]
    assert one[4] == "0.0%"
    assert two[:3] == ["2", "4", "50.0%"]
    assert two[3].startswith("50.0% (")
    assert two[4] == "25.0%"


def test_seeds_stand_side_by_side_with_their_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5 and 1.0 would have 0.75 -+ 12.706 * 0.35355 / sqrt(2)."""
    for name in ("own_fields-400", "own_fields-401", "whole-400"):
        (tmp_path / "study" / name).mkdir(parents=True)
    right = [answered("a", "sodium", "41 mmol", "41 mmol")]
    wrong = [answered("a", "sodium", "41 mmol", "40 mmol")]
    kept = {"own_fields-400": right + wrong, "own_fields-401": right, "whole-400": wrong}
    monkeypatch.setattr(records, "HOME", tmp_path)
    monkeypatch.setattr(records, "rows", lambda name, file: iter(kept[name.split("/")[1]]))
    assert seeds("study") == (
        ["", "400", "401", "mean", "95% interval"],
        [
            ["own fields: on policy", "50.0%", "100.0%", "75.0%", "0.0% to 100.0%"],
            ["whole: on policy", "0.0%", "", "0.0%", ""],
        ],
    )


def test_arms_of_a_sweep_are_paired_with_the_reference_by_desk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GRPO 0.25 and 0.5, with hints 0.75 and 1: 50 points each, so the interval has no width. Of
    means 37.5 and 87.5 it is -+ 12.706 * 17.678 / sqrt(2) = 158.8, cut to 0 to 100. The first
    rewards are 0.1, the last five's mean 0.3 and, once, 0.06."""
    monkeypatch.setattr(records, "HOME", tmp_path)
    desk = "study_channels_desk"

    def kept(variant: str, seed: int, right: Mapping[str, float], last: float) -> None:
        folder = tmp_path / "studies" / desk / f"{variant}-{seed}"
        folder.mkdir(parents=True)
        answers = [
            {"arm": arm, "sampled": False, "right": float(i < 4 * share)}
            for arm, share in right.items()
            for i in range(4)
        ]
        steps = [{"arm": "on_policy", "episodes": {"reward": r}} for r in (0.1, *[last] * 5)]
        for file, rows in (("answers", answers), ("metrics", steps)):
            (folder / f"{file}.jsonl.gz").write_bytes(gzip.compress(json_lines(rows).encode()))

    for seed, share, last in ((100, 0.25, 0.3), (101, 0.5, 0.06)):
        alone = {"document": 1.0, "untrained": 0.25, "on_policy": share}
        kept("document+untrained+GRPO", seed, alone, last)
        kept("GRPO_+_SDPO", seed, {"on_policy": share + 0.5}, 0.3)
    assert between(desk)[1] == []
    kept("GRPO_+_replay", 100, {"on_policy": 0.5}, 0.3)
    kept("GRPO_+_replay", 101, {"on_policy": 0.5}, 0.3)
    # -25 and -50 points: -37.5 -+ 12.706 * 17.678 / sqrt(2)
    found = ["GRPO + replay over GRPO + SDPO", "-37.5", "-196.3 to +121.3"]
    assert between(desk)[1] == [found]
    for seed in (100, 101):
        shutil.rmtree(tmp_path / "studies" / desk / f"GRPO_+_replay-{seed}")
    heads, body = over_reference(desk)
    assert heads == [
        "arm", "units", "right, %", "95% interval", "over GRPO, points", "95% interval",
    ]  # fmt: skip
    assert body == [
        ["document", "2", "100.0", "100.0 to 100.0", "+62.5", "-96.3 to +221.3"],
        ["untrained", "2", "25.0", "25.0 to 25.0", "-12.5", "-171.3 to +146.3"],
        ["GRPO", "2", "37.5", "0.0 to 100.0", "", ""],
        ["GRPO + SDPO", "2", "87.5", "0.0 to 100.0", "+50.0", "+50.0 to +50.0"],
    ]
    assert collapses(desk)[1] == [["GRPO", "+12.5", "-0.04"], ["GRPO + SDPO", "+62.5", "+0.20"]]
