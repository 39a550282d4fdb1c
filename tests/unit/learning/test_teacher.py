"""The teacher: its cache of documents, their KV in files, and scores against plain transformers."""

from __future__ import annotations

import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from channel_setup import bank_of, prefixes, scene
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from twins import NEAR

from cartridge_forge.learning import ranks as cores
from cartridge_forge.learning.batch import token_logprobs
from cartridge_forge.learning.ranks import concurrently
from cartridge_forge.learning.teacher import (
    TIMES_FREE,
    DocumentKVCache,
    HostCache,
    KVFiles,
    context_ids,
    contexts_of,
    document_kv,
    host_spill,
    response_logprobs,
    score,
    score_kept,
    score_over,
    top_k,
)
from cartridge_forge.plugins.objectives.policy_scores import with_references
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import CacheStats, hinted

if TYPE_CHECKING:
    from collections.abc import Callable

    from twins import Twin

    from cartridge_forge.protocols.step import Sample

    MakeSamples = Callable[..., list[Sample]]


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


IDS = (5, 3, 8)
Usage = namedtuple("Usage", ["total", "used", "free"])


def kv_of(ids: tuple[int, ...]) -> Tensor:
    return torch.tensor([float(i) for i in ids], dtype=torch.bfloat16).expand(2, 2, 1, -1)[
        ..., None
    ]


def cache_over(directory: Path) -> tuple[DocumentKVCache, list[tuple[int, ...]]]:
    read: list[tuple[int, ...]] = []

    def compute(ids: tuple[int, ...]) -> Tensor:
        read.append(ids)
        return kv_of(ids)

    return DocumentKVCache(compute, {"a": IDS}, 1000, files=KVFiles(directory)), read


def test_what_one_process_has_read_another_maps(tmp_path: Path) -> None:
    (one, computed), (other, computed_there) = (
        cache_over(tmp_path / "kv"),
        cache_over(tmp_path / "kv"),
    )
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
    cache, computed = cache_over(tmp_path)
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
    cache, computed = cache_over(tmp_path / "kv")
    assert torch.equal(cache.get("a"), kv_of(IDS))
    assert computed == [IDS]


def test_what_fails_while_it_is_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: object, file: Path) -> None:
        file.write_bytes(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cartridge_forge.learning.teacher.save_file", full)
    KVFiles(tmp_path).keep(IDS, kv_of(IDS))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("row_tokens", [16, 64])
def test_the_hinted_teacher_is_the_model_reading_cartridge_hint_and_turn(
    twin: Twin, row_tokens: int
) -> None:
    bank = bank_of(twin)
    batch, kv = scene(twin, bank), prefixes(bank)
    found = score_over(twin.model, hinted(batch.turns, batch.rl), kv, row_tokens)
    by_id = {r.sample.id: r.sample for r in batch.rl}
    expected = []
    for item in batch.turns:
        s = by_id[item.sample]
        turn = s.response_ids[item.start : item.stop]
        logits = twin.logits(item.context_ids + turn, kv[s.cartridge])
        expected.append(logits[len(item.context_ids) - 1 : -1])
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=5e-5)


def test_response_logprobs_are_the_log_softmax_of_score(
    twin: Twin, make_samples: MakeSamples
) -> None:
    samples = make_samples(("a", 4, 5), ("b", 2, 3))
    kv = {name: twin.kv[name] for name in "ab"}
    logits = score_over(twin.model, samples, kv, 20)
    torch.testing.assert_close(
        logits, score(twin.model, samples, twin.cached(), 20), rtol=0, atol=NEAR
    )
    picked = [
        row.log_softmax(-1)[token].item()
        for row, token in zip(logits, [t for s in samples for t in s.response_ids], strict=True)
    ]
    found = response_logprobs(twin.model, samples, kv, 20)
    assert not found.requires_grad
    assert found.tolist() == pytest.approx(picked, abs=NEAR)


@pytest.mark.parametrize("chunk", [None, 3])
def test_what_is_kept_of_a_score_is_its_top_or_all(
    twin: Twin, make_samples: MakeSamples, monkeypatch: pytest.MonkeyPatch, chunk: int | None
) -> None:
    """Also where the logits of three tokens exist at a time."""
    if chunk:
        monkeypatch.setattr("cartridge_forge.learning.teacher.LOGIT_BYTES", chunk * 97 * 4)
    samples = make_samples(("a", 4, 5), ("b", 2, 3))
    logits = score(twin.model, samples, twin.cached(), 20)
    kv = contexts_of(samples, twin.cached())
    assert torch.equal(score_kept(twin.model, samples, kv, 20, None)["logits"], logits)
    kept, expected = score_kept(twin.model, samples, kv, 20, 6), top_k(logits, 6)
    assert not kept["logprobs"].requires_grad
    assert torch.equal(kept["indices"], expected[0])
    torch.testing.assert_close(kept["logprobs"], expected[1], rtol=0, atol=2e-6 if chunk else 0)
    ours = response_logprobs(twin.model, samples, kv, 20)
    targets = torch.tensor([t for s in samples for t in s.response_ids])
    torch.testing.assert_close(ours, token_logprobs(logits, targets), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("keep_top", "keep_sampled"), [(None, False), (6, False), (6, True)])
def test_parts_scored_beside_each_other_are_the_whole(
    twin: Twin, make_samples: MakeSamples, monkeypatch: pytest.MonkeyPatch,
    keep_top: int | None, keep_sampled: bool,
) -> None:  # fmt: skip
    """Samples of two prefixes in turn: a part has those of one, and the rows come back in order."""
    samples = make_samples(("a", 4, 5), ("b", 2, 3), ("a", 3, 2), ("b", 5, 4))
    kv = contexts_of(samples, twin.cached())

    def kept() -> dict[str, torch.Tensor]:
        return score_kept(twin.model, samples, kv, 20, keep_top, keep_sampled=keep_sampled)

    ran: list[int] = []

    def noted(work: Any, parts: Any, passes: int) -> Any:
        ran.append(len(parts))
        return concurrently(work, parts, passes)

    monkeypatch.setattr("cartridge_forge.learning.teacher.concurrently", noted)
    monkeypatch.setattr(cores, "LEAST_TOKENS", 10)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = kept()
        torch.set_num_threads(2)
        parts = kept()
    finally:
        torch.set_num_threads(before)
    assert ran == [1, 2]
    assert list(parts) == list(whole)
    for name, value in parts.items():
        assert not value.requires_grad
        torch.testing.assert_close(value, whole[name], rtol=0, atol=NEAR)


def test_references_are_recomputed_where_stale(twin: Twin) -> None:
    bank = bank_of(twin)
    kv = prefixes(bank)
    fresh, stale = scene(twin, bank).pairs
    fresh = replace(fresh, ref_version=4, ref_chosen=-1.0)
    stale = replace(stale, ref_version=1)
    kept, renewed = with_references(twin.model, [fresh, stale], kv, 32, version=5, max_age=1)
    assert kept is fresh
    assert renewed.ref_version == 5
    for ids, reference in ((stale.chosen_ids, renewed.ref_chosen),
                           (stale.rejected_ids, renewed.ref_rejected)):  # fmt: skip
        logits = twin.logits(stale.context_ids + ids, kv[stale.cartridge])
        rows = logits[len(stale.context_ids) - 1 : -1].log_softmax(-1)
        expected = sum(row[token].item() for row, token in zip(rows, ids, strict=True))
        assert reference == pytest.approx(expected, abs=1e-4)
    assert with_references(twin.model, [stale], kv, 32, version=5, max_age=None) == [stale]
    assert with_references(twin.model, [], kv, 32, version=5, max_age=0) == []


def test_tokens_that_the_model_has_not_are_refused_before_a_pass(
    twin: Twin, make_samples: MakeSamples
) -> None:
    (sample,) = make_samples(("a", 4, 5))
    for part in ("prompt", "response"):
        ids = (*getattr(sample, f"{part}_ids")[:-1], twin.model.vocabulary)
        wrong = replace(sample, **{f"{part}_ids": ids})
        with pytest.raises(DataError, match=f"the {part} of sample {sample.id} has the token id"):
            score(twin.model, [wrong], twin.cached(), 20)
    cache = DocumentKVCache(lambda ids: document_kv(twin.model, ids), {"d": (6, 9_999)}, 1 << 20)
    with pytest.raises(DataError, match=r"document d: .* has the token id 9999 at 1"):
        cache.get("d")
