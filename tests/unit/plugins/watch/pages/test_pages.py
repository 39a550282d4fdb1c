"""Test what the pages read: rows by index, timelines, recalled documents."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from recorded_run import answer, at, finish, recorded_run, train

from cartridge_forge.plugins.spec_files.loading import load_resolved
from cartridge_forge.plugins.watch.pages.rollouts_page import recalled, split_passages, tallied
from cartridge_forge.plugins.watch.pages.row_index import (
    FollowedRows,
    GrowingFile,
    KeyedRows,
    RowFacts,
    RowFilter,
    RowIndex,
    filter_of,
)
from cartridge_forge.plugins.watch.pages.run_page import curves, overview, probe_interval
from cartridge_forge.plugins.watch.pages.run_view import RunView
from cartridge_forge.plugins.watch.pages.timeline import RunStage, stages
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.records.answers import to_row
from cartridge_forge.services.run_directory import RunDirectory


def write(path: Path, *rows: Any, mode: str = "a") -> None:
    with path.open(mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def facts(row: Any) -> RowFacts:
    nan = float("nan")
    return RowFacts(
        row.get("arm", "on_policy"), row["step"], row.get("document", "d1"), "question",
        row.get("question", "q"), row.get("verdict", nan), row.get("reward", nan), 3,
    )  # fmt: skip


def found(index: RowIndex, skip: int = 0, count: int = 10, **wanted: Any) -> list[int]:
    return [row["step"] for _, row in index.page(RowFilter(**wanted), skip, count).rows]


def test_a_growing_file_is_read_from_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = FollowedRows(path)
    rows.refresh()
    assert rows.mark == [0, 0]
    write(path, {"step": 1})
    rows.refresh()
    with path.open("a") as file:
        file.write('{"step": 2')  # a row that is being written
    rows.refresh()
    assert rows.rows == [{"step": 1}]
    with path.open("a") as file:
        file.write(', "kl": 0.5}\n\x00damaged\n')
    rows.refresh()
    assert rows.rows == [{"step": 1}, {"step": 2, "kl": 0.5}]
    assert rows.mark == [0, 2]


def test_what_is_not_new_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, {"step": 1})
    growing = GrowingFile(path)
    growing.begin()
    assert [line for _, line in growing.lines()] == [b'{"step": 1}']
    path.write_bytes(b"x" * path.stat().st_size)  # nobody would read this and miss it
    growing.begin()
    assert not growing.grew
    assert list(growing.lines()) == []


@pytest.mark.parametrize("replaced", [True, False])
def test_a_file_that_was_cut_back_is_read_anew(tmp_path: Path, replaced: bool) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, {"step": 1}, {"step": 2})
    rows = FollowedRows(path)
    rows.refresh()
    fresh = tmp_path / "fresh.jsonl" if replaced else path
    write(fresh, {"step": 9}, mode="w")
    os.replace(fresh, path)
    rows.refresh()
    assert rows.rows == [{"step": 9}]
    assert rows.mark == [1, 1]


def test_rows_are_found_by_every_filter_the_newest_first(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write(
        path,
        {"step": 1, "document": "d1", "verdict": 1.0, "reward": 0.5, "question": "a"},
        {"step": 2, "document": "d2", "verdict": 0.0, "reward": -1.0, "question": "b"},
        {"step": 3, "document": "d1", "verdict": 0.0, "question": "a"},
        {"step": 3, "document": "d1", "arm": "offline", "question": "a"},
        {"other": "a row of another version"},
    )
    index = RowIndex(path, facts)
    index.refresh()
    assert index.tokens == 12
    assert found(index) == [3, 3, 2, 1]
    assert found(index, document="d1", arm="on_policy") == [3, 1]
    assert found(index, verdict="right") == [1]
    assert found(index, verdict="wrong") == [3, 2]
    assert found(index, least=0.0) == [1]
    assert found(index, most=0.0) == [2]
    assert found(index, step=2) == [2]
    assert found(index, document="nobody") == []
    assert found(index, like=0) == [3, 3, 1]
    assert index.choices() == {
        "arm": ["on_policy", "offline"], "document": ["d1", "d2"], "kind": ["question"],
        "steps": [1, 3], "verdict": True, "reward": True,
    }  # fmt: skip


def test_pages_follow_each_other_and_new_rows_come_first(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, *({"step": step} for step in range(5)))
    index = RowIndex(path, facts)
    index.refresh()
    assert found(index, 0, 2) == [4, 3]
    assert found(index, 2, 2) == [2, 1]
    assert found(index, 4, 2) == [0]
    write(path, {"step": 5})
    index.refresh()
    page = index.page(RowFilter(), 0, 2)
    assert (page.total, page.rows) == (6, [(5, {"step": 5}), (4, {"step": 4})])


def test_the_rows_of_a_question_are_spread_over_its_versions(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, *({"step": step, "question": str(step % 2)} for step in range(20)))
    index = RowIndex(path, facts)
    index.refresh()
    page = index.spread(1, 4)  # of steps 1, 3, ... 19
    assert page.total == 10
    assert [row["step"] for _, row in page.rows] == [19, 13, 7, 1]
    assert [row["step"] for _, row in index.spread(1, 50).rows] == [*range(19, 0, -2)]


def test_a_row_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, {"step": 1})
    index = RowIndex(path, facts)
    index.refresh()
    with pytest.raises(DataError, match=r"rows.jsonl has no row 1: it has 1; load the page again"):
        index.row(1)
    with pytest.raises(DataError, match="has no row 7"):
        index.page(RowFilter(like=7), 0, 1)


def test_a_million_tokens_are_indexed_once_and_a_page_reads_its_rows_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"step": 1, "ids": list(range(100))}
    path.write_text((json.dumps(row) + "\n") * 10_000)  # of 100 tokens each
    index = RowIndex(path, facts)
    index.refresh()
    assert index.mark == [0, 10_000]
    path.write_bytes(path.read_bytes().replace(b'"step": 1', b'"step": 2', 1))  # the first row
    assert found(index, 9_998, 5) == [1, 2]  # read now, not at the time of the index


def test_filters_come_from_the_query() -> None:
    query = {"arm": "offline", "step": "12", "least": "-0.5", "document": "", "run": "r1"}
    assert filter_of(query) == RowFilter(arm="offline", step=12, least=-0.5)
    with pytest.raises(DataError, match="step must be a number: got 'twelve'; correct it"):
        filter_of({"step": "twelve"})


def test_rows_are_found_by_key_and_the_last_of_two_wins(tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    rows = KeyedRows(path, lambda row: row.get("id"))
    assert rows.find("a") is None
    write(path, {"id": "a", "kl": 1}, {"kl": 2}, {"id": "b", "kl": 3})
    assert rows.find("a") == {"id": "a", "kl": 1}
    write(path, {"id": "a", "kl": 4})
    assert (rows.find("a"), rows.find("b")) == ({"id": "a", "kl": 4}, {"id": "b", "kl": 3})
    assert rows.find("") is None


def test_rows_spread_over_a_file(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", *({"step": step} for step in range(10)))
    index = RowIndex(tmp_path / "rows.jsonl", facts)
    index.refresh()
    assert index.spread_over(4) == [9, 6, 3, 0]
    assert index.spread_over(50) == list(range(9, -1, -1))
    assert RowIndex(tmp_path / "none.jsonl", facts).spread_over(4) == []


TEXT = "The dose is 41 mg daily.\nShe has a cough. The pulse is 41 beats.\n\nNothing else."


def row(fact: str, expected: str | None, right: float) -> dict[str, object]:
    return {"fact": fact, "expected": expected, "right": right}


def test_a_question_is_about_the_passage_with_its_right_answer_and_most_of_its_words() -> None:
    passages = split_passages(TEXT)
    assert [line for line, _ in passages] == [0, 1, 1, 3]
    rows = [
        row("what is the dose?", "41 mg", 1.0),
        row("what is the pulse?", "41", 0.0),  # two passages hold 41; one the pulse
        row("the pulse of the patient?", "41 beats", 0.5),
        row("does she cough?", "yes", 1.0),  # none holds yes
        row("whither?", "rome", 1.0),  # about none of them
    ]
    assert tallied(passages, rows) == [(1, 1.0), (1, 1.0), (2, 0.5), (0, 0.0)]


def test_the_chart_of_a_run_is_drawn_again_and_marked(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    view = RunView("r", run.path)
    untold = recalled(view, "patient_01")
    assert untold["why_not"] == "no question was answered yet"
    chart = untold["passages"]
    assert chart[0]["text"].startswith("chart of ")
    asked = next(one["text"] for one in chart if "mmol" in one["text"]).rstrip(".")
    field, value = asked.split(maxsplit=1)
    given = {**to_row(answer(1, 1.0), "on_policy", 4, sampled=False), "cartridge": "patient_01"}
    run.append_answers([{**given, "fact": f"what is the {field}?", "expected": value}])  # type: ignore[typeddict-item]
    told = recalled(view, "patient_01")
    assert [one["text"] for one in told["passages"] if one["asked"]] == [f"{asked}."]
    assert (told["why_not"], told["cut"]) == (None, False)
    assert told["tokens"] > 100
    assert recalled(view, "nobody")["why_not"].endswith("has no cartridge 'nobody'; see its list")


STATUS: dict[str, Any] = {"arm": "on_policy", "steps": 4, "seconds_left": None}


def run_stages(run: RunDirectory, *, running: bool, done: int, offline: int = 0) -> list[RunStage]:
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    learn = load_resolved(run.spec).learn
    return stages(learn, events, {"on_policy": done}, running=running, offline_steps=offline)


def test_a_run_in_training(tmp_path: Path) -> None:
    # Ready after 10 s; two of four steps of 4 s each, and no evaluation was timed yet.
    assert run_stages(recorded_run(tmp_path), running=True, done=2) == [
        RunStage("start", "done", 10.0, 0.0),
        RunStage("train on policy", "now", 16.0, 8.0, 2, 4),
        RunStage("evaluate on policy", "later", None, None),
        RunStage("evaluate none", "later", None, None),
    ]


def test_a_run_that_was_killed_left_its_later_stages_out(tmp_path: Path) -> None:
    states = [stage.state for stage in run_stages(recorded_run(tmp_path), running=False, done=2)]
    assert states == ["done", "left out", "left out", "left out"]


def test_an_evaluation_takes_what_the_one_before_took(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    train(run, 3)
    train(run, 4)
    run.append_event("usable", now=at(26))
    run.append_event("evaluated", now=at(31), arm="on_policy", accuracy=1.0)
    assert run_stages(run, running=True, done=4)[2:] == [
        RunStage("evaluate on policy", "done", 5.0, 0.0),
        RunStage("evaluate none", "now", 5.0, 5.0),
    ]


def test_a_run_that_finished(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    finish(run)
    assert run_stages(run, running=False, done=4) == [
        RunStage("start", "done", 10.0, 0.0),
        RunStage("train on policy", "done", 16.0, 0.0, 4, 4),
        RunStage("evaluate on policy", "done", 5.0, 0.0),
        RunStage("evaluate none", "done", 5.0, 0.0),
    ]


def test_the_untrained_cartridges_answer_once_the_offline_text_is_written(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, sets=("evaluate.arms=[untrained, on_policy, offline]",))
    train(run, 3)
    train(run, 4)
    run.append_event("usable", now=at(26))
    run.append_event("evaluated", now=at(31), arm="on_policy", accuracy=1.0)
    assert [(s.name, s.state) for s in run_stages(run, running=True, done=4, offline=4)[3:5]] == [
        ("write offline text", "now"), ("evaluate untrained", "later"),
    ]  # fmt: skip
    run.append_event("checkpoint", now=at(40), arm="offline", step=0)
    run.append_event("evaluated", now=at(43), arm="untrained", accuracy=0.0)
    assert run_stages(run, running=True, done=4, offline=4)[3:] == [
        RunStage("write offline text", "done", 9.0, 0.0),
        RunStage("evaluate untrained", "done", 3.0, 0.0),
        RunStage("train offline", "now", 12.0, 12.0, 0, 4),  # rollouts, of 1 s, are over
        RunStage("evaluate offline", "later", 4.0, 4.0),  # the mean of 5 and 3 s
    ]


def test_a_resumed_run_counts_from_its_last_start(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    run.append_event("run_started", now=at(1000), resumed=True)
    run.append_event("role_ready", now=at(1003), role="generator")
    shown = run_stages(run, running=True, done=1)  # it was cut back to its checkpoint
    assert shown[0] == RunStage("start", "done", 3.0, 0.0)
    assert shown[1] == RunStage("train on policy", "now", 12.0, 12.0, 1, 4)


def test_the_time_left_is_of_the_whole_run(tmp_path: Path) -> None:
    view = RunView("tiny/r", recorded_run(tmp_path).path)
    shown = overview(view, STATUS)
    assert (shown["outcome"], shown["usable_in"], shown["seconds_left"]) == ("running", 8.0, None)
    assert overview(view, {**STATUS, "seconds_left": 31.0})["seconds_left"] == 31.0
    assert overview(view, None)["outcome"] == "unfinished"


@pytest.mark.parametrize(
    ("accuracy", "questions", "ci95"),
    [
        (0.5, 10, [0.2366, 0.7634]),  # `wilson_interval(5, 10)`
        (0.0, 10, [0.0, 0.2775]),
        (0.55, 10, None),  # no share of ten questions
        (0.5, 0, None),
    ],
)
def test_the_interval_of_a_validation(
    accuracy: float, questions: int, ci95: list[float] | None
) -> None:
    shown = probe_interval(accuracy, questions)
    assert shown == (None if ci95 is None else pytest.approx(ci95, abs=1e-4))


@pytest.mark.parametrize("measured", [True, False])
def test_a_validation_asks_what_the_evaluation_has(tmp_path: Path, measured: bool) -> None:
    """Six of eight right, by evaluate.questions or by what the evaluation then had."""
    questions = 300 if measured else 8
    sets = ("evaluate.probe_questions=48", f"evaluate.questions={questions}")
    run = recorded_run(tmp_path, sets=sets)
    if measured:
        run.append_event("evaluated", arm="on_policy", n=8, accuracy=0.75)
    (row,) = [row for row in curves(RunView("tiny", run.path), 0, 0)["rows"] if "ci95" in row]
    assert row["ci95"] == pytest.approx([0.4093, 0.9285], abs=1e-4)
