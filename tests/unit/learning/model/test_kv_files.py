"""A document's KV in files: equal to what was computed, read in its place, and never needed."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import Tensor

from learning.teacher import TIMES_FREE, DocumentKVCache, KVFiles

IDS = (5, 3, 8)
Usage = namedtuple("Usage", ["total", "used", "free"])


def kv_of(ids: tuple[int, ...]) -> Tensor:
    return torch.tensor([float(i) for i in ids], dtype=torch.bfloat16).expand(2, 2, 1, -1)[
        ..., None
    ]


def cache_of(directory: Path) -> tuple[DocumentKVCache, list[tuple[int, ...]]]:
    read: list[tuple[int, ...]] = []

    def compute(ids: tuple[int, ...]) -> Tensor:
        read.append(ids)
        return kv_of(ids)

    return DocumentKVCache(compute, {"a": IDS}, 1000, files=KVFiles(directory)), read


def test_what_one_process_has_read_another_maps(tmp_path: Path) -> None:
    (one, computed), (other, computed_there) = cache_of(tmp_path / "kv"), cache_of(tmp_path / "kv")
    assert torch.equal(one.get("a"), kv_of(IDS))
    found = other.get("a")
    assert (found.dtype, found.shape) == (torch.bfloat16, (2, 2, 1, 3, 1))
    assert torch.equal(found, kv_of(IDS))
    assert (computed, computed_there) == ([IDS], [])
    assert [file.suffix for file in (tmp_path / "kv").iterdir()] == [".safetensors"]
    assert (tmp_path / "kv").stat().st_mode & 0o77 == 0
    shutil.rmtree(tmp_path / "kv")  # a run that ends; the other still reads
    assert torch.equal(other.get("a"), kv_of(IDS))


def test_other_tokens_are_another_document(tmp_path: Path) -> None:
    files = KVFiles(tmp_path)
    files.keep(IDS, kv_of(IDS))
    assert files.read((5, 38)) is None
    assert files.read((5, 3)) is None


@pytest.mark.parametrize("content", [b"", b"no tensors", b"\x08" + bytes(7) + b'{"kv":0}'])
def test_a_damaged_file_is_read_again_and_replaced(tmp_path: Path, content: bytes) -> None:
    files = KVFiles(tmp_path)
    files.keep(IDS, kv_of(IDS))
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    cache, computed = cache_of(tmp_path)
    assert torch.equal(cache.get("a"), kv_of(IDS))
    assert computed == [IDS]
    found = files.read(IDS)
    assert found is not None
    assert torch.equal(found, kv_of(IDS))


def test_a_disk_with_little_room_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = kv_of(IDS)
    for free, kept in ((TIMES_FREE * kv.nbytes - 1, 0), (TIMES_FREE * kv.nbytes, 1)):
        usage = Usage(10**9, 0, free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        KVFiles(tmp_path).keep(IDS, kv)
        assert len([*tmp_path.iterdir()]) == kept
    (written,) = tmp_path.iterdir()
    both = TIMES_FREE * (written.stat().st_size + kv.nbytes)
    for free, kept in ((both - 1, 1), (both, 2)):
        usage = Usage(10**9, 0, free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        KVFiles(tmp_path).keep(IDS[:2], kv)
        assert len([*tmp_path.iterdir()]) == kept


def test_a_place_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    cache, computed = cache_of(tmp_path / "kv")
    assert torch.equal(cache.get("a"), kv_of(IDS))
    assert computed == [IDS]


def test_what_fails_while_it_is_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: object, file: Path) -> None:
        file.write_bytes(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("learning.teacher.save_file", full)
    KVFiles(tmp_path).keep(IDS, kv_of(IDS))
    assert not [*tmp_path.iterdir()]
