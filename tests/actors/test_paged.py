"""Where a cartridge lies in paged memory, by hand and against the plain way to say it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.paged import cache_salt, check_shape, kv_heads, slots
from protocols.errors import PublishError


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


def test_salts_are_apart_by_name_version_and_request() -> None:
    salts = [
        cache_salt(name, version, private)
        for name in ("a", "a@1", "b")
        for version in (0, 1, 11)
        for private in ("", "1", "2")
    ]
    assert len(set(salts)) == len(salts)
    assert cache_salt("a", 1) == cache_salt("a", 1)


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
        (1, 4, 2, 2, 28, 32),  # one cartridge for two names
        (2, 3, 2, 2, 28, 32),  # another model's layers
        (2, 4, 1, 2, 28, 32),  # keys without values
        (2, 4, 2, 1, 28, 32),  # another number of heads
        (2, 4, 2, 2, 28, 64),  # another size of head
        (2, 4, 2, 2, 0, 32),  # no token
        (4, 2, 2, 28, 32),  # no names at all
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused(shape: tuple[int, ...]) -> None:
    check_shape((2, 4, 2, 2, 28, 32), 4, 2, 32, names=2)
    with pytest.raises(PublishError, match=r"model takes \[2, 4, 2, 2, P, 32\]; train and sample"):
        check_shape(shape, 4, 2, 32, names=2)
