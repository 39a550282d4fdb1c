"""The document cache: least recently used, bounded in bytes, counted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learning.prefixes import DocumentCache
from protocols.errors import DataError


class Reader:
    """Gives each token sequence a KV of 8 bytes a token, and remembers what it has read."""

    def __init__(self) -> None:
        self.read: list[tuple[int, ...]] = []

    def __call__(self, ids: tuple[int, ...]) -> Tensor:
        self.read.append(ids)
        return torch.tensor([float(i) for i in ids]).expand(1, 2, 1, -1).clone()[..., None]


DOCUMENTS = {"a": (1,), "b": (2,), "c": (3, 3), "d": (4,) * 5}  # 8, 8, 16, 40 bytes


def cache_of(max_bytes: int) -> tuple[DocumentCache, Reader]:
    reader = Reader()
    return DocumentCache(reader, DOCUMENTS, max_bytes), reader


def test_a_document_is_read_once() -> None:
    cache, reader = cache_of(100)
    first = cache.get("c")
    assert first.flatten().tolist() == [3, 3, 3, 3]
    assert cache.get("c") is first
    assert reader.read == [(3, 3)]
    assert (cache.hits, cache.misses, cache.held_bytes) == (1, 1, 16)


def test_the_least_recently_used_goes_first() -> None:
    cache, reader = cache_of(24)
    for name in "aba":  # b is now the older one
        cache.get(name)
    cache.get("c")  # 8 + 8 + 16 > 24
    assert cache.held_bytes == 24
    cache.get("a")
    assert reader.read == [(1,), (2,), (3, 3)]
    cache.get("b")  # dropped before; pushes out c, which is older than a
    cache.get("a")
    cache.get("c")
    assert reader.read == [(1,), (2,), (3, 3), (2,), (3, 3)]
    assert (cache.hits, cache.misses) == (3, 5)


def test_one_more_byte_than_the_bound_is_too_many() -> None:
    cache, _ = cache_of(16)
    cache.get("a")
    cache.get("b")
    assert cache.held_bytes == 16
    cache, _ = cache_of(15)
    cache.get("a")
    cache.get("b")
    assert cache.held_bytes == 8


def test_a_document_beyond_the_bound_is_served_and_displaces_nothing() -> None:
    cache, reader = cache_of(39)
    cache.get("a")
    assert cache.get("d").shape == (1, 2, 1, 5, 1)
    assert cache.held_bytes == 8
    cache.get("a")
    cache.get("d")
    assert reader.read == [(1,), (4,) * 5, (4,) * 5]
    assert (cache.hits, cache.misses) == (1, 3)


def test_an_unknown_name_is_refused_and_counted_as_nothing() -> None:
    cache, reader = cache_of(39)
    assert "a" in cache
    assert "z" not in cache
    with pytest.raises(DataError, match=r"no document 'z'; this run has \['a', 'b', 'c', 'd'\]"):
        cache.get("z")
    assert (cache.hits, cache.misses, reader.read) == (0, 0, [])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("abcd"), max_size=20), st.integers(0, 80))
def test_the_bound_holds_and_what_is_served_is_right(names: list[str], max_bytes: int) -> None:
    cache, reader = cache_of(max_bytes)
    held: list[str] = []  # the same policy over names alone, oldest first
    for name in names:
        kv = cache.get(name)
        assert kv[0, 0, 0, :, 0].tolist() == list(DOCUMENTS[name])
        size = {n: 8 * len(ids) for n, ids in DOCUMENTS.items()}
        if name in held or size[name] <= max_bytes:
            held = [*(n for n in held if n != name), name]
        while sum(size[n] for n in held) > max_bytes:
            held.pop(0)
        assert list(cache._held) == held
        assert cache.held_bytes <= max_bytes
    assert cache.hits + cache.misses == len(names)
    assert cache.misses == len(reader.read)
