"""Prompts and tokens of the shipped reader's tokenizer."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rooms.environments.template_shapes import tokenizer
from serving_setup import READER

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.wire.errors import ApiError
from cartridge_forge.plugins.serve.tokenization import DATES, Tokenization


@cache
def texts() -> Tokenization:
    return Tokenization(load_tokenizer(str(READER)))


def test_a_chat_without_a_cartridge_stands_behind_the_first_token() -> None:
    messages = (AgentMessage("user", "Who?"),)
    bare, over = texts().chat(messages, False), texts().chat(messages, True)
    assert texts().first == (1,)  # <|bos|>, which the generators read as their prefix
    assert bare.ids == over.ids
    assert bare.ids[0] == 4  # <|user|>
    assert bare.ids[-1] == 5  # <|assistant|>
    assert (bare.counted, over.counted) == (len(bare.ids) + 1, len(over.ids))


def test_ids_are_read_as_they_are_and_begin_once() -> None:
    assert texts().prompt([1, 60], False, "prompt").ids == (60,)
    assert texts().prompt([60], False, "prompt").ids == (60,)
    assert texts().prompt([60], False, "prompt").counted == 2
    assert texts().prompt([1, 60], True, "prompt").ids == (1, 60)


@pytest.mark.parametrize("ids", [[], [1], [99_999], [-1]])
def test_ids_that_cannot_be_read(ids: list[int]) -> None:
    with pytest.raises(ApiError) as refused:
        texts().prompt(ids, False, "prompt")
    assert (refused.value.status_code, refused.value.param) == (400, "prompt")


def test_half_a_surrogate_pair_is_no_character() -> None:
    for read in (
        lambda: texts().prompt("\ud800", False, "prompt"),
        lambda: texts().chat((AgentMessage("user", "\ud800"),), False),
    ):
        with pytest.raises(ApiError, match="half of a surrogate pair"):
            read()


def test_an_id_without_a_token_has_no_text() -> None:
    """Embeddings are padded beyond the tokenizer, and some tokenizers leave ids out."""
    assert texts().token(texts().vocabulary + 5) == ("", [])


def test_a_plain_chat_has_todays_date_and_one_over_a_cartridge_its_own() -> None:
    served, user = Tokenization(tokenizer("llama3")), (AgentMessage("user", "why?"),)
    served._today = served.renderer(datetime(2020, 1, 2))  # the server started then
    days = {datetime.now().date(), (datetime.now() + timedelta(minutes=5)).date()}
    plain = served.decode(served.chat(user, False).ids)
    assert any(f"Today: {day:%d %b %Y}" in plain for day in days)
    over = served.chat(user, True, date=datetime(2025, 3, 4))
    assert over.ids == served.chat(user, True).ids  # the head alone has the date
    told = served.chat(user, False, date=datetime(2025, 3, 4))
    assert "Today: 04 Mar 2025" in served.decode(told.ids)
    for number in range(DATES + 3):
        served.chat(user, True, date=datetime(2025, 1, 1) + timedelta(days=number))
    assert len(served._dated) == DATES


@given(st.text(min_size=1, max_size=30).filter(lambda t: t.strip()))
def test_the_bytes_of_tokens_are_those_of_the_text(text: str) -> None:
    ids = texts().prompt(text, True, "prompt").ids
    data = b"".join(bytes(texts().token(i)[1]) for i in ids if i > 5)
    if all(i > 5 for i in ids):  # a text may hold the words of special tokens
        assert data.decode().lstrip(" ") == text.lstrip(" ")
