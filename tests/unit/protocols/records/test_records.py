"""Test records of answers, scores and the date of a chat."""

from __future__ import annotations

import base64
import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.protocols.errors import CheckpointError
from cartridge_forge.protocols.records.answers import (
    LEAST,
    MOST,
    TEXT_LIMIT,
    Answer,
    clusters,
    cut,
    decoded,
    decoded_top,
    encoded,
    encoded_top,
    hash_of,
    mean_nll,
    pairing_key,
    to_row,
)
from cartridge_forge.protocols.records.run_files import (
    CHAT_FILE,
    date_of,
    read_date,
    source_of,
    write_date,
)
from cartridge_forge.protocols.step import Completion

ANSWER = Answer(
    id="p/1", fact="what is the sodium?", document="p", document_hash="0a", question_hash="1b",
    text="x" * 5000, answer="41 mmol", expected="41 mmol", right=1.0, nll=0.5, tokens=5000,
)  # fmt: skip


def test_a_row_has_the_arm_and_a_bounded_text() -> None:
    row = to_row(ANSWER, "on_policy", 180, sampled=True)
    assert (row["arm"], row["step"], row["sampled"]) == ("on_policy", 180, True)
    assert row["text"] is not None
    assert len(row["text"]) == TEXT_LIMIT
    assert row["text"].endswith("x [cut: 5,000 characters]")
    assert (row["answer"], row["right"], row["nll"], row["reward"]) == ("41 mmol", 1.0, 0.5, None)
    assert cut("y" * TEXT_LIMIT) == "y" * TEXT_LIMIT
    assert cut(None) is None


def test_hashes_tell_apart_what_names_do_not() -> None:
    assert hash_of("a", "b") != hash_of("ab") != hash_of("a")
    assert hash_of("\ud800") != hash_of("\ud801")  # half a character, as a tiny model samples it
    one = to_row(ANSWER, "none", 0, sampled=False)
    elsewhere = to_row(replace(ANSWER, document_hash="0c"), "none", 0, sampled=False)
    assert pairing_key(one) != pairing_key(elsewhere)
    documents, facts = clusters([one, elsewhere, one])
    assert documents == ["p/0a", "p/0c", "p/0a"]
    assert facts == [f"{name}/what is the sodium?" for name in documents]


def test_the_loss_is_the_mean_over_the_answer() -> None:
    read = Completion("r", (1,), (-0.1,), (0,), "stop", prompt_logprobs=(-9.0, -1.0, -2.0))
    assert mean_nll(read, 2) == pytest.approx(1.5)
    assert mean_nll(read, 4) is None
    assert mean_nll(read, 0) is None


def test_a_date_is_kept_to_the_second(tmp_path: Path) -> None:
    write_date(tmp_path, datetime(2026, 7, 26, 23, 59, 59, 120_000, tzinfo=UTC))
    assert (tmp_path / CHAT_FILE).read_text() == '{"date": "2026-07-26T23:59:59"}\n'
    found = read_date(tmp_path)
    assert found == datetime(2026, 7, 26, 23, 59, 59)
    assert source_of(found) == {"chat_date": "2026-07-26T23:59:59"}
    assert date_of({"run": "r", **source_of(found)}) == found


def test_what_keeps_no_date(tmp_path: Path) -> None:
    assert read_date(tmp_path) is None
    assert source_of(None) == {}
    for source in ({}, {"chat_date": None}, {"chat_date": "soon"}):
        assert date_of(source) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"date": "soon"}', '{"date": 3}'])
def test_a_damaged_date_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / CHAT_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"chat.json has no date .* restore it from a copy"):
        read_date(tmp_path)


def test_known_values_are_these_bytes() -> None:
    # Half way in the logarithm is sqrt(1e-5 * 50) = 0.02236.
    values = [0.0, LEAST, -1e-9, 0.02236068, MOST, 900.0, None, math.nan]
    assert base64.b64decode(encoded(values)) == bytes([0, 0, 0, 127, 254, 254, 255, 255])


def test_what_was_written_is_read() -> None:
    read = decoded("AH/+/w==")
    assert read[0] == 0.0
    assert read[1:3] == pytest.approx([0.02236068, 50.0])
    assert read[3] is None
    with pytest.raises(ValueError, match=r"padding|base64"):
        decoded("A")


@given(st.floats(min_value=1.1 * LEAST, max_value=MOST))
def test_a_value_is_off_by_three_percent_at_most(value: float) -> None:
    (read,) = decoded(encoded([value]))
    assert read == pytest.approx(value, rel=0.0309)


def test_likely_tokens_are_five_bytes_each() -> None:
    # -log p of 0 is byte 0, and of sqrt(1e-5 * 50) byte 127.
    text = encoded_top([[(258, 0.0), (7, -0.02236068)]])
    assert base64.b64decode(text) == bytes([2, 1, 0, 0, 0, 7, 0, 0, 0, 127])
    assert decoded_top(text, [None, 0.5]) == [None, [(258, 0.0), (7, pytest.approx(-0.02236068))]]
    assert decoded_top("", [None, 0.5]) == [None, None]
    with pytest.raises(ValueError, match="10 bytes are not the likeliest of 3 tokens"):
        decoded_top(text, [0.5, 0.5, 0.5])
