"""Rows of JSON lines, Parquet and functions: columns, splits, documents, and every bad row."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cartridge_forge.plugins.chat.messages import AgentMessage, AgentTool
from cartridge_forge.plugins.documents.rows.reading import of_split, read_row_set, split_files
from cartridge_forge.plugins.documents.spec.rows import RowsSpec
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.learn import LearnSpec

PLAIN: dict[str, Any] = {
    "model": {"path": "m"}, "cartridge": {"tokens": 8}, "train": {"steps": 1, "row_tokens": 64},
    "rollout": {"prompts": 1, "max_tokens": 8}, "episodes": {"tasks": 1, "max_context": 32},
    "reward": [{"verifier": "exact"}], "objective": {"w_rl": 1.0},
}  # fmt: skip
TOOL = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}


def spec(source: str, path: str, share: float = 0.5, **rows: Any) -> LearnSpec:
    data = {"source": source, "path": path, "patients": 9, "held_out": share, "rows": rows}
    return LearnSpec.read({**PLAIN, "data": data})


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


def sums(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i} + {i}", "answer": 2 * i, "level": i % 3} for i in range(count)]


def test_json_lines_are_split_by_the_hash_of_prompt_and_seed(tmp_path: Path) -> None:
    path = lines(tmp_path / "sums.jsonl", sums(40))
    found = read_row_set(spec("jsonl", str(path)))
    held = {row.messages[0].content for row in found.held_out}
    assert len(found.training) + len(found.held_out) == 40
    assert 10 <= len(held) <= 30
    assert found.columns == ["answer", "level", "prompt"]
    row = found.training[0]
    assert (row.document, row.answer, row.tools) == (None, row.columns["answer"], ())
    # Neither order nor other rows move a row; another seed does.
    lines(path, [*reversed(sums(40)), {"prompt": "more"}])
    again = {row.messages[0].content for row in read_row_set(spec("jsonl", str(path))).held_out}
    assert again - {"more"} == held
    other = spec("jsonl", str(path))
    other = other.model_copy(update={"data": other.data.model_copy(update={"seed": 1})})
    assert {r.messages[0].content for r in read_row_set(other).held_out} - {"more"} != held


def test_columns_have_other_names_and_prompts_are_chats(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"},
            {"role": "user", "content": "2 + 2"}]  # fmt: skip
    rows = [
        {"chat": chat, "page": "a page", "gold": "4", "use": [TOOL]},
        {"chat": "3 + 3", "page": "a page", "gold": "6", "use": json.dumps([{"function": TOOL}])},
    ]
    held = lines(tmp_path / "test.jsonl", [{"chat": "1", "page": "another", "gold": "1"}])
    names = {"prompt": "chat", "document": "page", "answer": "gold"}
    path = lines(tmp_path / "train.jsonl", rows)
    learn = spec(
        "jsonl", str(path), columns={**names, "tools": "use"}, held_out=str(held)
    )  # fmt: skip
    with pytest.raises(DataError, match=r"test.jsonl:1: there is no column 'use' \(data.rows.col"):
        read_row_set(learn)
    lines(held, [{"chat": "1", "page": "another", "gold": "1", "use": None}])
    found = read_row_set(learn)
    first, second = found.training
    assert first.messages[1] == AgentMessage("assistant", "yes?")
    assert first.tools == second.tools == (AgentTool("add", "Add.", {"type": "object"}),)
    assert first.document == second.document != found.held_out[0].document
    assert sorted(found.texts.values()) == ["a page", "another"]
    assert (first.answer, first.columns["answer"], first.columns["gold"]) == ("4", "4", "4")


def test_documents_are_named_by_path(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    folder.mkdir()
    (folder / "one.md").write_text("the first page")
    rows = [{"prompt": f"p{i}", "document": "one.md"} for i in range(8)]
    path = lines(tmp_path / "a.jsonl", rows)
    found = read_row_set(spec("jsonl", str(path), documents=str(folder)))
    assert dict(found.texts) == {"one": "the first page"}
    assert {row.document for row in found.training} == {"one"}
    lines(path, [*rows, {"prompt": "p", "document": "two.md"}])
    with pytest.raises(DataError, match=r"a.jsonl:9: column 'document' names 'two.md', and .* one"):
        read_row_set(spec("jsonl", str(path), documents=str(folder)))


def test_parquet_has_the_same_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "sums.parquet"
    parquet.write_table(pa.Table.from_pylist(sums(40)), path)
    found = read_row_set(spec("parquet", str(path)))
    other = read_row_set(spec("jsonl", str(lines(tmp_path / "sums.jsonl", sums(40)))))
    assert found.sha256 == other.sha256
    assert found.training[0].place.startswith("sums.parquet:row ")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"sums.parquet: cannot be read as Parquet"):
        read_row_set(spec("parquet", str(path)))
    parquet.write_table(pa.Table.from_pylist([{"prompt": "a", "raw": b"x"}]), path)
    with pytest.raises(DataError, match=r"sums.parquet:row 1: column raw holds bytes"):
        read_row_set(spec("parquet", str(path)))


def test_a_function_gives_rows_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, sys, time\n"
        "def sums(count):\n"
        "    print('told nobody')\n"
        "    for i in range(count):\n"
        "        yield {'prompt': f'{i} + {i}', 'answer': 2 * i, 'level': i % 3}\n"
        "def wrong(): return 3\n"
        "def raises(): yield {'prompt': 'a'}; raise KeyError('gone')\n"
        "def leaves(): sys.exit(1)\n"
        "def hangs(): time.sleep(60); yield {}\n"
        "def eats(): yield {'prompt': 'a' * 2**30}\n"
    )
    found = read_row_set(spec("python", "mine:sums", folder=str(tmp_path), arguments={"count": 40}))
    assert len(found.training) + len(found.held_out) == 40

    def refused(name: str, match: str, **rows: Any) -> None:
        with pytest.raises(DataError, match=match):
            read_row_set(spec("python", f"mine:{name}", folder=str(tmp_path), **rows))

    refused("wrong", "mine:wrong must give rows one by one: got int 3")
    refused("raises", "mine:raises: mine.py:7: KeyError: 'gone'")
    refused("leaves", "mine:leaves: mine.py:8: SystemExit: 1")
    refused("nothing", "AttributeError: module 'mine' has no attribute 'nothing'")
    refused("hangs", "takes over 1 s to read; raise data.rows.timeout_s", timeout_s=1.0)
    refused("eats", "MemoryError|takes over 128 MiB", memory_mib=128)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "bad.jsonl has no row"),
        (["{"], "bad.jsonl:1: is no JSON"),
        (["", "[1]"], "bad.jsonl:2: a row must be an object of columns: got list"),
        ([{"text": "a"}], "bad.jsonl:1: there is no column 'prompt' .* the row has text"),
        ([{"prompt": 3}], "bad.jsonl:1: column 'prompt' must be text, or chat .*: got int 3"),
        ([{"prompt": [{"role": "me", "content": "a"}]}], "bad.jsonl:1: column 'prompt' must be"),
        ([{"prompt": [{"role": "assistant", "content": "a"}]}], "that end with a user's"),
        ([{"prompt": "a", "document": 3}], "bad.jsonl:1: column 'document' must be text: got int"),
        ([{"prompt": "a", "tools": [{"call": 1}]}], "bad.jsonl:1: column 'tools' must be a list"),
        ([{"prompt": "a"}], "of 1 rows none is"),
        ([{"prompt": f"{i}", "document": f"d{i}"} for i in range(30)],
         "the rows are about 30 documents, and data.patients allows 9; raise it"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    path = lines(tmp_path / "bad.jsonl", rows)
    with pytest.raises(DataError, match=message):
        read_row_set(spec("jsonl", str(path)))


def test_a_held_out_prompt_that_is_trained_on_is_refused(tmp_path: Path) -> None:
    path, held = (
        lines(tmp_path / f"{n}.jsonl", [{"prompt": "a"}, {"prompt": n}]) for n in ("x", "y")
    )
    with pytest.raises(
        DataError, match=r"1 of 2 held-out prompts are trained on too, .* y.jsonl:1"
    ):
        read_row_set(spec("jsonl", str(path), held_out=str(held)))


def test_the_hub_is_not_asked_where_that_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="HF_HUB_OFFLINE forbids it; unset it, or bring the files"):
        split_files("openai/gsm8k", "train", RowsSpec())
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with pytest.raises(DataError, match=r"the hub at http://127.0.0.1:9 does not do it for op"):
        split_files("openai/gsm8k", "train", RowsSpec(endpoint="http://127.0.0.1:9"))


def test_a_split_is_brought_from_the_commit_that_was_listed(tmp_path: Path) -> None:
    asked: list[Any] = []

    class Api:
        endpoint = "http://hub.test"

        def dataset_info(self, repo: str, revision: str | None, timeout: float) -> Any:
            names = ["README.md", "data/train-00000-of-00001.parquet", "data/test.parquet"]
            return SimpleNamespace(
                sha="c0ffee", siblings=[SimpleNamespace(rfilename=n) for n in names]
            )

        def hf_hub_download(self, repo: str, name: str, **options: Any) -> str:
            asked.append((repo, name, options))
            return str(tmp_path / name)

    files, commit = split_files("a/b", "train", RowsSpec(revision="main"), Api())  # type: ignore[arg-type]
    assert (files, commit) == ([tmp_path / "data/train-00000-of-00001.parquet"], "c0ffee")
    assert asked == [
        ("a/b", "data/train-00000-of-00001.parquet", {"repo_type": "dataset", "revision": "c0ffee"})
    ]
    with pytest.raises(
        DataError, match="a/b has no Parquet or JSON lines of the split dev; it has R"
    ):
        split_files("a/b", "dev", RowsSpec(), Api())  # type: ignore[arg-type]


def test_the_files_of_a_split() -> None:
    names = ["README.md", "main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet",
             "main/test-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet",
             "train.jsonl", "trainer.jsonl"]  # fmt: skip
    assert of_split(names, "train", "main") == names[1:3]
    assert of_split(names, "test", None) == [names[3]]
    assert of_split(["train.jsonl", "trainer.jsonl"], "train", None) == ["train.jsonl"]
    assert of_split(names, "validation", None) == []
    with pytest.raises(DataError, match="several folders hold the split train: main, socratic"):
        of_split(names, "train", None)
