"""Where a cartridge lies in paged memory, by hand and against the plain way to say it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.vllm.kv_layout import (
    CartridgeSlice,
    PromptCartridge,
    cache_salt,
    cartridges_of,
    check_shape,
    kv_heads,
    pieces,
    slots,
)
from cartridge_forge.protocols.errors import DataError, PublishError
from cartridge_forge.protocols.step import PrefixRef, composed_ref


def test_slots_by_hand() -> None:
    assert slots((7, 3), 32, 0, 2) == [224, 225]
    assert slots((7, 3), 32, 31, 34) == [255, 96, 97]
    assert slots((7, 3), 32, 50, 50) == []


@given(
    blocks=st.lists(st.integers(0, 500), min_size=1, max_size=6, unique=True),
    size=st.sampled_from([16, 32, 48]),
    data=st.data(),
)
def test_slots_are_the_rows_of_the_blocks_laid_end_to_end(
    blocks: list[int], size: int, data: st.DataObject
) -> None:
    laid = [slot for b in blocks for slot in range(b * size, (b + 1) * size)]
    first = data.draw(st.integers(0, len(laid)))
    stop = data.draw(st.integers(first, len(laid)))
    assert slots(blocks, size, first, stop) == laid[first:stop]


def test_pieces_by_hand() -> None:
    a, b = PromptCartridge("a", 7, 50), PromptCartridge("b", 8, 30)
    assert pieces((a,), 0, 50) == [CartridgeSlice(a, 0, 0, 50)]
    assert pieces((a, b), 0, 80) == [CartridgeSlice(a, 0, 0, 50), CartridgeSlice(b, 50, 0, 30)]
    assert pieces((a, b), 32, 80) == [CartridgeSlice(a, 0, 32, 50), CartridgeSlice(b, 50, 0, 30)]
    assert pieces((a, b), 64, 80) == [CartridgeSlice(b, 50, 14, 30)]
    assert pieces((b, a), 30, 80) == [CartridgeSlice(a, 30, 0, 50)]
    assert pieces((a, b), 80, 80) == []


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5), data=st.data())
def test_pieces_are_a_slice_of_all_laid_end_to_end(lengths: list[int], data: st.DataObject) -> None:
    parts = [PromptCartridge(str(i), 0, tokens) for i, tokens in enumerate(lengths)]
    laid = [(p.name, token) for p in parts for token in range(p.tokens)]
    first = data.draw(st.integers(0, len(laid)))
    stop = data.draw(st.integers(first, len(laid)))
    found = pieces(parts, first, stop)
    assert [(p.part.name, t) for p in found for t in range(p.first, p.stop)] == laid[first:stop]
    assert [p.start + t for p in found for t in range(p.first, p.stop)] == [*range(first, stop)]


def test_salts_are_apart_by_names_versions_order_and_request() -> None:
    names = ("a", "a@1", "b", "a@1,b", "b#1")
    singles = [PromptCartridge(name, version, 9) for name in names for version in (0, 1, 11)]
    salts = [
        cache_salt(parts, private)
        for parts in [(p,) for p in singles] + [(p, q) for p in singles for q in singles]
        for private in ("", "1", "2")
    ]
    assert len(set(salts)) == len(salts)
    assert cache_salt([PromptCartridge("a", 7, 9), PromptCartridge("b", 8, 9)]) == "a@7,b@8"


def prefix(*names: str) -> PrefixRef:
    return composed_ref([PrefixRef(name, i) for i, name in enumerate(names)])


def test_the_cartridges_of_a_request() -> None:
    tokens = {("a", 0): 50, ("b/c", 1): 30, ("a", 1): 9}
    assert cartridges_of("r", prefix("document/d"), tokens) == ()
    assert cartridges_of("r", prefix("cartridge/a"), tokens) == (PromptCartridge("a", 0, 50),)
    both = (PromptCartridge("a", 0, 50), PromptCartridge("b/c", 1, 30))
    assert cartridges_of("r", prefix("cartridge/a", "cartridge/b/c"), tokens) == both


@pytest.mark.parametrize("names", [("cartridge/a", "document/d"), ("document/d", "cartridge/a")])
def test_a_document_among_others_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(DataError) as caught:
        cartridges_of("r", prefix(*names), {("a", 0): 50, ("a", 1): 50})
    assert str(caught.value) == (
        "request r composes document/d with other prefixes: vLLM computes a document as tokens, "
        "which would see the cartridges before it, and loads cartridges only before all tokens; "
        "compose cartridges alone, or use generator.backend torch"
    )


@pytest.mark.parametrize(
    ("heads", "ranks", "expected"),
    [
        (8, 1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, 2, [[0], [1]]),
        (2, 4, [[0], [0], [1], [1]]),  # more ranks than heads: two ranks hold the same one
        (1, 2, [[0], [0]]),
    ],
)
def test_heads_of_every_rank(heads: int, ranks: int, expected: list[list[int]]) -> None:
    assert [list(range(heads))[kv_heads(heads, r, ranks)] for r in range(ranks)] == expected


@pytest.mark.parametrize(
    "shape",
    [
        (3, 2, 2, 28, 32),  # another model's layers
        (4, 1, 2, 28, 32),  # keys without values
        (4, 2, 1, 28, 32),  # another number of heads
        (4, 2, 2, 28, 64),  # another size of head
        (4, 2, 2, 0, 32),  # no token
        (1, 4, 2, 2, 28, 32),  # several cartridges as one
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused(shape: tuple[int, ...]) -> None:
    check_shape("a", (4, 2, 2, 28, 32), 4, 2, 32)
    with pytest.raises(PublishError, match=r"cartridge a .* takes \[4, 2, 2, P, 32\]; train and"):
        check_shape("a", shape, 4, 2, 32)
