"""Test files: atomic writes, the layout of a run, room on the disk."""

from __future__ import annotations

import errno
import os
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.files import (
    REPOSITORY,
    RESERVE,
    append_rows,
    hold_room,
    read_rows,
    replacing,
    salvage,
    with_room,
)
from cartridge_forge.protocols.layout import CartridgeLayout, layout_of, length_warning
from cartridge_forge.protocols.spec.cartridge import CartridgeSpec


@pytest.mark.parametrize("old", [None, "file", "folder"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_folder_takes_the_place_of_anything_or_leaves_it(
    tmp_path: Path, old: str | None, fails: bool
) -> None:
    path = tmp_path / "here"
    if old == "file":
        path.write_text("old")
    elif old == "folder":
        (path / "old").mkdir(parents=True)
    before = list(tmp_path.rglob("*"))

    def write() -> None:
        with replacing(path) as fresh:
            fresh.mkdir()
            (fresh / "new").write_text("new")
            if fails:
                raise OSError(28, "No space left on device")

    if fails:
        with pytest.raises(OSError, match="No space"):
            write()
        assert list(tmp_path.rglob("*")) == before
    else:
        write()
        assert list(tmp_path.rglob("*")) == [path, path / "new"]


def test_a_wheel_has_the_files_that_are_read_from_beside_the_code() -> None:
    setuptools = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
    for name in ("configs/eval.yaml", "configs/frontier.yaml", "configs/forgetting.json",
                 "deploy/monitoring/rules.yml", "deploy/monitoring/dashboard.json"):  # fmt: skip
        file = REPOSITORY / name
        package = f"cartridge_forge/{Path(name).parent}".replace("/", ".")
        assert any(fnmatch(package, p) for p in setuptools["packages"]["find"]["include"])
        assert any(file in file.parent.glob(p) for p in setuptools["package-data"][package])


# Contexts with their documents: a is cut in two.
CONTEXTS = {"a.part_01": "a", "a.part_02": "a", "b": "b", "c": "c"}


def made(**changes: object) -> CartridgeLayout:
    spec = CartridgeSpec.model_validate({"tokens": 8, **changes})
    return layout_of(spec, CONTEXTS)


def test_each_document_has_a_cartridge_of_its_own_in_all_its_contexts() -> None:
    found = made()
    assert found.contexts == {"a": ("a.part_01", "a.part_02"), "b": ("b",), "c": ("c",)}
    assert found.turns == [("a", "a"), ("b", "b"), ("c", "c")]
    assert [found.cartridge_of(name) for name in "abc"] == ["a", "b", "c"]
    assert not found.shared


def test_a_corpus_has_one_cartridge() -> None:
    found = made(per="corpus")
    assert found.contexts == {"corpus": ("a.part_01", "a.part_02", "b", "c")}
    assert found.turns == [("a", "corpus"), ("b", "corpus"), ("c", "corpus")]
    assert found.cartridge_of("c") == "corpus"
    assert found.shared
    # One document is no several, however many its chunks are.
    one = layout_of(CartridgeSpec(tokens=8, per="corpus"), {"a.part_01": "a", "a.part_02": "a"})
    assert not one.shared


def test_a_document_of_two_groups_is_trained_in_both_and_asked_over_the_first() -> None:
    found = made(per="group", groups={"late": ["[bc]"], "early": ["a", "b"]})
    assert found.cartridges == {"late": ("b", "c"), "early": ("a", "b")}
    assert found.contexts["early"] == ("a.part_01", "a.part_02", "b")
    assert found.turns == [("a", "early"), ("b", "early"), ("b", "late"), ("c", "late")]
    assert [found.cartridge_of(name) for name in "abc"] == ["early", "late", "late"]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"x": ["a"], "y": ["b"]}, r"cartridge\.groups has no group for c; add a pattern"),
        ({"x": ["*"], "y": ["d?"]}, r"groups\.y: 'd\?' matches none of the documents a, b, c"),
    ],
)
def test_groups_that_do_not_fit_the_documents_are_refused(
    groups: dict[str, list[str]], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        made(per="group", groups=groups)


@pytest.mark.parametrize(
    "changes",
    [
        {"per": "group"}, {"groups": {"x": ["a"]}}, {"per": "group", "groups": {}},
        {"per": "group", "groups": {"x/y": ["a"]}}, {"per": "group", "groups": {"x": []}},
    ],
)  # fmt: skip
def test_groups_are_given_with_per_group_alone(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="groups"):
        CartridgeSpec.model_validate({"tokens": 8, **changes})


def test_a_cartridge_no_shorter_than_its_texts_is_warned_of() -> None:
    assert length_warning(28, {"a": 29, "b": 231}) is None
    assert length_warning(28, {"a": 28}) == (
        "cartridge.tokens (28) is no fewer than the 28 tokens of a: such a cartridge saves "
        "nothing; lower it, for example --set cartridge.tokens=3"
    )
    several = length_warning(1000, {"a": 900, "b": 2000, "c": 40})
    assert several is not None
    assert "the 40 tokens of c and 1 more" in several


def full(path: Path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_a_full_disk_frees_the_reserve_and_writes_again(tmp_path: Path) -> None:
    hold_room(tmp_path, 4096)
    reserve = tmp_path / RESERVE
    path = tmp_path / "checkpoints" / "last-state" / "manifest.json"
    written = []

    def write() -> str:
        if reserve.exists():
            raise full(path)
        written.append(path)
        return "done"

    assert with_room(path, write) == "done"
    assert written == [path]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_other_errors_and_a_disk_without_a_reserve_are_raised(tmp_path: Path, number: int) -> None:
    tries = []

    def write() -> None:
        tries.append(1)
        raise OSError(number, os.strerror(number))

    if number != errno.ENOSPC:
        hold_room(tmp_path, 4096)
    with pytest.raises(OSError, match=os.strerror(number)):
        with_room(tmp_path / "file", write)
    assert tries == [1]
    assert (tmp_path / RESERVE).exists() == (number != errno.ENOSPC)


def test_rows_that_do_not_fit_leave_no_part_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes what fits, and refuses the rest: the first is no error."""
    path = tmp_path / "rows.jsonl"
    append_rows(path, [{"step": 1}])
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:5]))
    append_rows(path, [{"step": 2}])  # in pieces, and whole
    room = [7]

    def write_until_full(file: int, data: bytes) -> int:
        if not room:
            raise full(path)
        return write(file, data[: room.pop()])

    monkeypatch.setattr(os, "write", write_until_full)
    with pytest.raises(OSError, match="No space left"):
        append_rows(path, [{"step": 3}])
    monkeypatch.undo()
    append_rows(path, [{"step": 4}])
    assert read_rows(path) == [{"step": 1}, {"step": 2}, {"step": 4}]


def test_a_device_without_room_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        append_rows(tmp_path / "rows.jsonl", [{"step": 1}], create=False)


def test_salvage_tells_torn_from_damaged(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert salvage(path) == ([], [], False)
    path.write_bytes(b'{"a": 1}\n{"a\n17\n{"a": 2}')
    assert salvage(path) == ([{"a": 1}, {"a": 2}], [2, 3], False)
    path.write_bytes(b'{"a": 1}\n{"a')
    assert salvage(path) == ([{"a": 1}], [], True)
