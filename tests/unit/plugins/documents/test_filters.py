"""Faults of a text by hand, doubles and near doubles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.documents.filters import (
    DuplicateFilter,
    TextBounds,
    fault,
    jaccard,
    normalised,
    shingles,
)

PASSAGE = (
    "The kestrels of the old mill breed nine days earlier than they did when the notebooks began."
)


@pytest.mark.parametrize(
    ("text", "ended", "expected"),
    [
        ("", True, "empty"),
        (" ...\n", True, "empty"),
        ("Why?", True, "too_short"),
        ("word " * 41, True, "too_long"),
        ("When do the birds breed now", False, "no_end"),
        ("a b c d " * 5, True, "repetition"),
        ("a b c d " * 2, True, None),
        ("The kestrels of the old mill breed nine days earlier than they did.", True, "echo"),
        ("of the old mill", True, "echo"),
        ("By how many days is the first egg earlier now?", True, None),
    ],
)
def test_faults(text: str, ended: bool, expected: str | None) -> None:
    assert fault(text, PASSAGE, ended, TextBounds(least_words=3, most_words=40)) == expected


def test_likeness_by_hand() -> None:
    a, b = shingles("one two three four"), shingles("one two three five")
    assert (len(a), len(b)) == (2, 2)  # one-two-three is in both
    assert jaccard(a, b) == pytest.approx(1 / 3)
    assert shingles("One, two") == shingles("one two")
    assert jaccard(frozenset(), frozenset()) == 1.0


def test_doubles_and_near_doubles() -> None:
    seen = DuplicateFilter(alike=0.8)
    words = [f"w{i}" for i in range(30)]
    assert seen.found("Where do kestrels breed?") is None
    assert seen.found("where do KESTRELS breed") == "double"
    assert seen.found(" ".join(words)) is None
    # One word at the end: 28 shingles before, 29 with it, 28 in both.
    assert seen.found(" ".join([*words, "more"])) == "near_double"
    assert seen.found(" ".join([*words[:15], "other", *words[16:]])) == "near_double"  # 25 of 31
    changed = [*words[:9], "other", *words[10:20], "thing", *words[21:]]
    assert seen.found(" ".join(changed)) is None  # 22 of 34
    assert seen.found(" ".join(words[:20])) is None  # 18 of 28: not alike enough


@given(st.lists(st.text("abc ", min_size=1, max_size=30), max_size=25))
def test_doubles_are_found_as_by_comparing_all(texts: list[str]) -> None:
    seen, kept = DuplicateFilter(alike=0.8), []
    for text in texts:
        like = any(
            normalised(text) == normalised(k) or jaccard(shingles(text), shingles(k)) >= 0.8
            for k in kept
        )
        assert (seen.found(text) is not None) == like
        if not like:
            kept.append(text)
