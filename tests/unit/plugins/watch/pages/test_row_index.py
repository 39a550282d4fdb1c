"""Files that grow are read once; rows are found by filters without reading the file again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.plugins.watch.pages.row_index import (
    KeyedRows,
    RowFacts,
    RowFilter,
    RowIndex,
    filter_of,
)
from cartridge_forge.plugins.watch.pages.tail import FollowedRows, GrowingFile
from cartridge_forge.protocols.errors import DataError


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
