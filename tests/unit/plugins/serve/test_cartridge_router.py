"""What `auto` reads of the library at each request: nothing that has not changed."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cartridge_forge.plugins.library.changes import (
    CHANGES,
    MOST_BYTES,
    ChangeReader,
    note_change,
)
from cartridge_forge.plugins.library.formats.base_model import BaseModelInfo
from cartridge_forge.plugins.library.names import CartridgeName, listing
from cartridge_forge.plugins.library.store import CartridgeStore, CartridgeVersion
from cartridge_forge.plugins.library.terms import read_terms, write_terms
from cartridge_forge.plugins.serve.routing import CartridgeRouter, WordIndex
from cartridge_forge.protocols.errors import DataError

BASE = BaseModelInfo(layers=2, kv_heads=1, head_dim=4, context=64, config_sha256="c" * 64)


class CountingStore(CartridgeStore):
    """Count what is read of it."""

    reads = 0

    def _entry(self, name: str, version: int) -> CartridgeVersion:
        self.reads += 1
        return super()._entry(name, version)

    def passages(self, entry: CartridgeVersion) -> Any:
        self.reads += 1
        return super().passages(entry)


def add(library: CartridgeStore, name: str, words: dict[str, int]) -> None:
    with library.incoming() as file:
        save_file({"kv": torch.ones(2, 2, 1, 3, 4)}, file)
        library.add(name, file, {"by": "test"}, [words])


def long_ago(library: CartridgeStore) -> None:
    """Set the times of all cartridges' directories back, as hours would."""
    then = time.time() - 3600
    for folder in library.directory.iterdir():
        os.utime(folder, (then, then))


@pytest.fixture
def library(tmp_path: Path) -> CountingStore:
    library = CountingStore(tmp_path / "library", BASE)
    for name, word in (("p1", "salt"), ("p2", "iron"), ("p3", "zinc")):
        add(library, name, {word: 3})
    long_ago(library)
    return library


def test_nothing_is_read_twice_that_has_not_changed(library: CountingStore) -> None:
    router = CartridgeRouter(library)
    assert router.names() == ("p1", "p2", "p3")
    library.reads = 0
    for _ in range(50):
        assert router.names() == ("p1", "p2", "p3")
    assert library.reads == 0
    assert router.choose("how much iron?").entry.key == ("p2", 1)
    assert library.reads == 1  # of the one that was chosen


def test_what_changed_is_seen_at_the_next_call(library: CountingStore) -> None:
    router = CartridgeRouter(library)
    assert router.choose("iron").entry.key == ("p2", 1)
    add(library, "p2", {"gold": 3})
    assert router.choose("gold").entry.key == ("p2", 2)
    with pytest.raises(DataError):
        router.choose("iron")
    library.describe(library.get(CartridgeName("p1")), [{"iron": 2}])
    assert router.choose("iron").entry.key == ("p1", 1)
    library.drop("p1")
    with pytest.raises(DataError):
        router.choose("iron")
    for number in range(5):  # within a tick of the clock
        add(library, "p9", {f"word{number}": 1})
        assert router.choose(f"word{number}").entry.key == ("p9", number + 1)
    assert CartridgeRouter(library, lambda name: name == "p3").names() == ("p3",)


class CountingIndex(WordIndex):
    """Note the names whose directories are looked at."""

    def __init__(self, library: CartridgeStore) -> None:
        super().__init__(library)
        self.looked: list[str] = []

    def look(self, name: str, again: bool = False) -> None:
        self.looked.append(name)
        super().look(name, again)


@pytest.mark.parametrize("cartridges", [3, 60])
def test_a_choice_reads_what_changed_and_its_own_manifest(tmp_path: Path, cartridges: int) -> None:
    library = CountingStore(tmp_path / "library", BASE)
    for number in range(cartridges):
        add(library, f"p{number}", {f"word{number}": 1})
    index = CountingIndex(library)
    router = CartridgeRouter(library, None, index)
    library.reads = 0
    assert router.choose("word2").entry.key == ("p2", 1)
    # The manifest and the words of each, and the manifest of the chosen one.
    assert (library.reads, len(index.looked)) == (2 * cartridges + 1, cartridges)
    other = CartridgeStore(library.directory, BASE)  # as of another process
    index.looked, library.reads = [], 0
    for _ in range(5):
        assert router.choose("word1").entry.key == ("p1", 1)
    assert (library.reads, index.looked) == (5, [])
    add(other, "p1", {"gold": 1})
    library.reads = 0
    assert router.choose("gold").entry.key == ("p1", 2)
    assert (library.reads, index.looked) == (3, ["p1"])
    other.tag(CartridgeName("p1"), "best")
    add(other, "p01", {"lead": 1})
    index.looked = []
    assert router.choose("lead").entry.key == ("p01", 1)
    assert index.looked == ["p01"]
    other.drop("p01")
    other.drop("p2")
    index.looked = []
    with pytest.raises(DataError, match="shares no word"):
        router.choose("word2 lead")
    assert sorted(index.looked) == ["p01", "p2"]


def test_what_no_tool_noted_is_seen_by_a_look_at_all(library: CountingStore) -> None:
    router = CartridgeRouter(library)
    assert router.choose("iron salt salt").entry.key == ("p1", 1)
    words = library.get(CartridgeName("p3")).terms
    write_terms(words, {"p3": [{"gold": 2, "salt": 1, "iron": 1}]})
    os.utime(words, ns=(1, 1))
    with pytest.raises(DataError):
        router.choose("gold")
    assert not router.index.is_due  # it was read a moment ago
    router.index.rescan()
    assert router.choose("gold").entry.key == ("p3", 1)
    shutil.copytree(library.directory / "p3", library.directory / "p4")  # of another name inside
    (library.directory / "p4/1/manifest.json").unlink()
    assert router.choose("gold").entry.key == ("p3", 1)
    shutil.rmtree(library.directory / "p3")
    with pytest.raises(DataError):
        router.choose("gold")


def test_the_chosen_one_is_what_stands_there_now(library: CountingStore) -> None:
    router = CartridgeRouter(library)
    assert router.choose("iron salt").entry.key == ("p1", 1)
    # None of these is noted, and each is of the best choice.
    manifest = library.get(CartridgeName("p1")).path.with_name("manifest.json")
    whole = manifest.read_text()
    manifest.write_text(whole[:40])
    assert router.choose("iron salt").entry.key == ("p2", 1)
    shutil.rmtree(library.directory / "p2/1")
    with pytest.raises(DataError, match=r"name one: p3$"):
        router.choose("iron salt")
    manifest.write_text(whole)
    assert router.names() == ("p1", "p3")
    assert router.choose("iron salt").entry.key == ("p1", 1)


def test_keys_share_an_index_of_what_they_may_use(library: CountingStore) -> None:
    """The index has no word of a cartridge before a key asks that may use it."""
    index = CountingIndex(library)
    one = CartridgeRouter(library, {"p1", "p2"}.__contains__, index)
    every = CartridgeRouter(library, None, index)
    assert one.choose("iron").entry.key == ("p2", 1)
    assert index.bm25.names == ("p1", "p2")
    assert every.choose("zinc iron").entry.key == ("p2", 1)
    assert index.bm25.names == ("p1", "p2", "p3")
    with pytest.raises(DataError, match=r"name one: p1, p2$"):
        one.choose("zinc")
    add(library, "p3", {"salt": 1})
    add(library, "p0", {"salt": 9})
    private = CartridgeRouter(library, {"p1", "p2"}.__contains__)
    for question in ("salt", "iron salt"):
        assert one.choose(question).why == private.choose(question).why
    assert every.choose("salt").entry.key == ("p0", 1)
    assert one.page("", 9) == (["p1", "p2"], False)
    assert every.page("p0", 2) == (["p1", "p2"], True)
    assert every.page("p2", 2) == (["p3"], False)
    library.drop("p2")
    assert every.page("p1", 1) == (["p3"], False)


def test_a_page_read_before_a_question_hides_no_cartridge(library: CountingStore) -> None:
    router = CartridgeRouter(library)
    router.choose("salt")
    add(library, "p4", {"gold": 1})
    assert router.page("", 9) == (["p1", "p2", "p3", "p4"], False)
    assert router.choose("gold").entry.key == ("p4", 1)


def test_messages_name_a_few_of_many() -> None:
    assert listing([]) == ""
    assert listing(f"p{n}" for n in range(3)) == "p0, p1, p2"
    assert listing(f"p{n}" for n in range(10_000)).endswith("p18, p19 and more")


def test_changes_are_read_line_by_line_from_where_the_last_ended(tmp_path: Path) -> None:
    reader = ChangeReader(tmp_path)
    assert reader.read() == set()
    for name in ("p1", "p2", "p1"):
        note_change(tmp_path, name)
    late = ChangeReader(tmp_path)
    assert (reader.read(), late.read()) == ({"p1", "p2"}, set())
    file = tmp_path / CHANGES
    with file.open("a") as opened:
        opened.write("p3\n../p4\np")
        opened.flush()
        assert reader.read() == {"p3"}
        opened.write("5\n")
    assert (reader.read(), late.read()) == ({"p5"}, {"p3", "p5"})
    file.unlink()
    assert reader.read() is None  # and a name may have been noted in it
    assert reader.read() == set()
    note_change(tmp_path, "p6")
    assert reader.read() == {"p6"}
    file.write_text("#0123456789abcdef\np1\n")  # of the same size, in its place
    assert reader.read() is None
    file.write_text("#0123456789abcdef\n" + "p1\n" * (MOST_BYTES // 3))  # as if it had grown
    assert reader.read() == {"p1"}
    note_change(tmp_path, "p7")  # the file begins anew
    assert reader.read() is None
    note_change(tmp_path, "p8")
    assert reader.read() == {"p8"}
    assert file.read_text().splitlines()[1:] == ["p7", "p8"]


def test_a_count_that_is_none_is_refused(tmp_path: Path) -> None:
    for count in (0, -1, 2**31, True, 1.5, "3"):
        write_terms(tmp_path / "terms.json", {"p1": [{"salt": count}]})  # type: ignore[dict-item]
        with pytest.raises(DataError, match=r"no readable words \(a count"):
            read_terms(tmp_path / "terms.json")
