"""Rows of answers.jsonl: bounded texts, hashes that tell questions apart, losses by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cartridge_forge.protocols.records.answers import (
    TEXT_LIMIT,
    Answer,
    clusters,
    cut,
    hash_of,
    mean_nll,
    pairing_key,
    to_row,
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
