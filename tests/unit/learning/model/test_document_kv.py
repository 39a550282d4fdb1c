"""The document cache: least recently used, bounded in bytes, counted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learning.teacher import DocumentKVCache, HostCache, context_ids, host_spill
from protocols.errors import DataError
from protocols.types import CacheStats


class Reader:
    """Gives each token sequence a KV of 8 bytes a token, and remembers what it has read."""

    def __init__(self) -> None:
        self.read: list[tuple[int, ...]] = []

    def __call__(self, ids: tuple[int, ...]) -> Tensor:
        self.read.append(ids)
        return torch.tensor([float(i) for i in ids]).expand(1, 2, 1, -1).clone()[..., None]


DOCUMENTS = {"a": (1,), "b": (2,), "c": (3, 3), "d": (4,) * 5}  # 8, 8, 16, 40 bytes


def cache_of(max_bytes: int) -> tuple[DocumentKVCache, Reader]:
    reader = Reader()
    return DocumentKVCache(reader, DOCUMENTS, max_bytes), reader


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
        assert list(cache._cached) == held
        assert cache.held_bytes <= max_bytes
    assert cache.hits + cache.misses == len(names)
    assert cache.misses == len(reader.read)


# -- host memory --------------------------------------------------------------------------------


class Host:
    """A second place that marks what lies there, and remembers what moved."""

    def __init__(self, max_bytes: int) -> None:
        self.moved: list[tuple[str, int]] = []
        self.spill = HostCache(max_bytes, self.out, self.back)

    def out(self, kv: Tensor) -> Tensor:
        self.moved.append(("out", kv.nbytes))
        return kv + 1000

    def back(self, kv: Tensor) -> Tensor:
        self.moved.append(("back", kv.nbytes))
        return kv - 1000


def spilling(max_bytes: int, host_bytes: int) -> tuple[DocumentKVCache, Reader, Host]:
    reader, host = Reader(), Host(host_bytes)
    return DocumentKVCache(reader, DOCUMENTS, max_bytes, host.spill), reader, host


def test_what_leaves_the_device_comes_back_by_a_copy() -> None:
    cache, reader, host = spilling(16, 8)
    cache.get("a")
    cache.get("c")  # 16 bytes: a goes out
    assert (cache.held_bytes, cache.spilled_bytes) == (16, 8)
    assert cache.get("a").flatten().tolist() == [1.0, 1.0]  # c, too large for the host, is dropped
    assert (cache.held_bytes, cache.spilled_bytes) == (8, 0)
    assert host.moved == [("out", 8), ("back", 8)]
    assert reader.read == [(1,), (3, 3)]
    cache.get("a")
    assert cache.counts == CacheStats(hits=1, host_hits=1, misses=2, evictions=2)


def test_the_host_drops_what_left_the_device_first() -> None:
    cache, reader, host = spilling(8, 16)
    for name in "abc":  # b pushes a out; c, larger than the device, goes out at once
        cache.get(name)
    assert host.moved == [("out", 8), ("out", 16)]
    assert cache.spilled_bytes == 16  # c alone: a made room for it
    cache.get("c")
    cache.get("a")
    assert reader.read == [(1,), (2,), (3, 3), (1,)]
    # b, pushed out by a, took the place of c.
    assert host.moved[2:] == [("back", 16), ("out", 8)]
    assert cache.counts == CacheStats(hits=0, host_hits=1, misses=4, evictions=2)


def test_a_cpu_has_no_second_place() -> None:
    assert host_spill(torch.device("cpu"), 1 << 30) is None


def test_other_devices_have_pageable_memory_that_holds_the_same() -> None:
    """Over the one device without memory that there is everywhere: shapes and types alone."""
    spill = host_spill(torch.device("meta"), 64)
    assert spill is not None
    assert spill.max_bytes == 64
    kv = torch.zeros(1, 2, 1, 3, 4, dtype=torch.bfloat16)
    there = spill.out(kv)
    assert (there.device.type, there.dtype, there.shape) == ("cpu", kv.dtype, kv.shape)
    assert torch.equal(there, kv)
    assert spill.back(there).device.type == "meta"


@given(st.lists(st.sampled_from("abcd"), max_size=25), st.integers(0, 80), st.integers(0, 80))
def test_both_bounds_hold_and_values_do_not_depend_on_them(
    names: list[str], max_bytes: int, host_bytes: int
) -> None:
    cache, reader, _ = spilling(max_bytes, host_bytes)
    for name in names:
        kv = cache.get(name)
        assert kv[0, 0, 0, :, 0].tolist() == list(DOCUMENTS[name])
        assert cache.held_bytes <= max_bytes
        assert cache.spilled_bytes <= host_bytes
        assert not set(cache._cached) & set(cache._spilled)
    counts = cache.counts
    assert counts.hits + counts.host_hits + counts.misses == len(names)
    assert counts.misses == len(reader.read)
    # A second place saves reads and changes nothing else.
    alone, more = cache_of(max_bytes)
    for name in names:
        alone.get(name)
    assert (alone.hits, alone.evictions) == (counts.hits, counts.evictions)
    assert len(more.read) == counts.misses + counts.host_hits


def test_what_was_looked_up_since() -> None:
    before, after = CacheStats(1, 2, 3, 4), CacheStats(5, 5, 5, 5)
    assert after.since(before) == CacheStats(4, 3, 2, 1)
    assert before + after.since(before) == after


def test_contexts_are_joined_as_one_text() -> None:
    """The begin token stands once, and the joined text is cached under its own name."""
    documents = {"none": (1,), "x": (1, 10, 11), "y": (1, 20)}
    assert context_ids(documents, "x") == (1, 10, 11)
    assert context_ids(documents, "y\nx\ny") == (1, 20, 10, 11, 20)
    assert context_ids(documents, "") == ()
    with pytest.raises(DataError, match="no document 'z'"):
        context_ids(documents, "x\nz")
    reader = Reader()
    cache = DocumentKVCache(reader, documents, 1 << 20)
    cache.get("x\ny")
    cache.get("x\ny")
    assert (reader.read, cache.hits, cache.misses) == ([(1, 10, 11, 20)], 1, 1)
