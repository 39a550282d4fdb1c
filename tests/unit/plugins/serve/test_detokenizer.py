"""Text as it is told: whole characters, stop strings, tokens with their places."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.chat.wire.detokenizer import Detokenizer, StopFilter, TextPiece
from cartridge_forge.protocols.ports import TokenChunk
from cartridge_forge.protocols.step import Completion

END = 256


def decode(ids: Sequence[int]) -> str:
    """Every byte is a token; 256 ends."""
    return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def tell(
    text: str | bytes, stops: Sequence[str] = (), size: int = 1, end: bool = True
) -> list[TextPiece]:
    data = text.encode() if isinstance(text, str) else text
    ids = (*data, END) if end else tuple(data)
    logprobs = tuple(-float(i) for i in range(len(ids)))
    teller = Detokenizer(decode, stops, frozenset({END}))
    pieces = [
        teller.feed(TokenChunk("r", i, ids[i : i + size], logprobs[i : i + size]))
        for i in range(0, len(ids), size)
    ]
    done = Completion("r", ids, logprobs, (0,) * len(ids), "stop" if end else "length")
    return [*pieces, teller.finish(done)]


def said(pieces: Sequence[TextPiece]) -> str:
    return "".join(p.text for p in pieces)


@given(st.text(max_size=40), st.integers(1, 7))
def test_a_text_is_told_whole_and_never_by_halves(text: str, size: int) -> None:
    pieces = tell(text.replace("\ufffd", ""), size=size)
    assert said(pieces) == text.replace("\ufffd", "")
    assert not any("\ufffd" in p.text for p in pieces)
    assert pieces[-1].finish_reason == "stop"


@given(st.binary(max_size=30))
def test_any_bytes_are_told_as_they_decode(data: bytes) -> None:
    assert said(tell(data)) == data.decode("utf-8", "replace")


def test_a_character_of_four_tokens_comes_with_its_last() -> None:
    assert [p.text for p in tell("a😀")] == ["a", "", "", "", "😀", "", ""]


def test_a_character_that_never_becomes_whole_is_marked_at_the_end() -> None:
    pieces = tell(b"ab\xf0\x9f", end=False)
    assert [p.text for p in pieces] == ["a", "b", "", "", "\ufffd"]
    assert pieces[-1].finish_reason == "length"


def reference(text: str, stops: Sequence[str]) -> str:
    """Character by character: the first that completes a stop, the longest of them."""
    for end in range(1, len(text) + 1):
        found = [len(s) for s in stops if text[:end].endswith(s)]
        if found:
            return text[: end - max(found)]
    return text


@given(
    st.text("abc", max_size=14),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.integers(1, 5),
)
def test_stops_cut_alike_however_the_text_is_cut(text: str, stops: list[str], size: int) -> None:
    stream = StopFilter(stops)
    told = [stream.feed(text[i : i + size]) for i in range(0, len(text), size)]
    if stream.cut is None:
        told.append(stream.flush())
    assert "".join(told) == reference(text, stops)
    # At no time was anything told that had to be taken back.
    for i in range(len(told)):
        assert reference(text, stops).startswith("".join(told[: i + 1]))


def test_what_may_begin_a_stop_is_held_back() -> None:
    stream = StopFilter(["STOP"])
    assert stream.feed("one S") == "one "
    assert stream.feed("T") == ""
    assert stream.feed("x S") == "STx "
    assert stream.feed("TOP and more") == ""
    assert stream.cut == 8
    assert stream.feed("!") == ""


def test_tokens_are_those_of_the_text() -> None:
    pieces = tell("ab. cd", stops=[". "])
    tokens = [t for p in pieces for t in p.tokens]
    assert said(pieces) == "ab"
    assert [(t.id, t.offset, t.logprob) for t in tokens] == [(97, 0, -0.0), (98, 1, -1.0)]
    assert pieces[-1].finish_reason == "stop"


def test_tokens_of_a_split_character_share_its_place_and_the_end_token_is_none() -> None:
    tokens = [t for p in tell("é!") for t in p.tokens]
    assert [(t.id, t.offset) for t in tokens] == [(0xC3, 0), (0xA9, 0), (0x21, 1)]


@pytest.mark.parametrize("again", [0, 1, 3])
def test_tokens_that_come_again_are_told_once(again: int) -> None:
    teller = Detokenizer(decode, (), frozenset({END}))
    first = teller.feed(TokenChunk("r", 0, (97, 98, 99), (0.0, 0.0, 0.0)))
    second = teller.feed(TokenChunk("r", again, (97, 98, 99, 100)[again:], (0.0,) * (4 - again)))
    assert (first.text, second.text) == ("abc", "d")
    assert teller.feed(TokenChunk("r", 9, (120,), (0.0,))).text == ""  # a gap: the end has it all
    ids = (97, 98, 99, 100, 101)
    assert teller.finish(Completion("r", ids, (0.0,) * 5, (0,) * 5, "length")).text == "e"
