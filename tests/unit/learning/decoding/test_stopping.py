"""Text token by token, and where a response ends, against tokens that are bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.decoding.stopping import UNFINISHED, StopChecker, StopMatch, TokenText
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import StopCondition


def decode(ids: Sequence[int]) -> str:
    """Tokens are bytes, as in the rarest words of a byte-level tokenizer."""
    return bytes(ids).decode("utf-8", errors="replace")


def fed(until: StopCondition, text: str, top: Sequence[float] = (-1.0,)) -> StopMatch | None:
    stopper = StopChecker(until, decode)
    for token in text.encode():
        if cut := stopper.add(token, top):
            return cut
    return None


@given(st.text())
def test_text_comes_in_whole_characters_and_adds_up(text: str) -> None:
    said = TokenText(decode)
    pieces = [said.add(token) for token in text.encode()]
    if UNFINISHED not in text:
        assert all(UNFINISHED not in piece for piece in pieces)
        assert said.text == "".join(pieces) == text
        assert said.ends[-1:] == ([len(text)] if text else [])
    assert "".join(pieces) + said.rest() == text


def test_half_a_character_is_held_back_until_the_end() -> None:
    said = TokenText(decode)
    assert [said.add(token) for token in "aé€".encode()[:-1]] == ["a", "", "é", "", ""]
    assert said.ends == [1, 1, 2, 2, 2]
    assert (said.rest(), said.text) == (UNFINISHED, f"aé{UNFINISHED}")


@pytest.mark.parametrize(
    ("until", "text", "cut"),
    [
        (StopCondition(strings=("\n\n",)), "one\n\ntwo", StopMatch(5, "\n\n")),
        (StopCondition(strings=("zz", "wo")), "one two", StopMatch(7, "wo")),
        (StopCondition(strings=("x",)), "one", None),
        # Nothing is looked at before `after` tokens; what stood there then counts at once.
        (StopCondition(strings=(".",), after=6), "a. b. c", StopMatch(6, ".")),
        (
            StopCondition(patterns=(r"answer: \d+ ",)),
            "the answer: 42 or",
            StopMatch(15, r"answer: \d+ "),
        ),
        # Before a match: its first token goes too, and so does all behind.
        (StopCondition(patterns=("wait",), before=True), "so. wait, no", StopMatch(4, "wait")),
        (
            StopCondition(strings=("wait",), before=True, after=5),
            "so. wait, no wait",
            StopMatch(13, "wait"),
        ),
        # What would leave nothing is passed over.
        (StopCondition(strings=("wait",), before=True), "wait. ok", None),
        (StopCondition(strings=("é",), before=True), "aéb", StopMatch(1, "é")),
    ],
)
def test_ends_by_hand(until: StopCondition, text: str, cut: StopMatch | None) -> None:
    assert fed(until, text) == cut


def test_confidence_ends_at_the_first_full_window_below_the_floor() -> None:
    """Means of 2: 4, 2, 1, .5: the floor of 2 is not below 2."""
    stopper = StopChecker(StopCondition(window=2, floor=2.0, top=2), decode)
    confidences = [4.0, 4.0, 0.0, 2.0, 9.0]
    cuts = [stopper.add(97, (-c + 0.5, -c - 0.5, -99.0)) for c in confidences]
    assert cuts == [None, None, None, StopMatch(4, "confidence"), None]


def test_a_wrong_pattern_is_named() -> None:
    with pytest.raises(DataError, match=r"until\.patterns holds no regular expression"):
        StopChecker(StopCondition(patterns=("(",)), decode)
