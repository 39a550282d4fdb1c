"""Test names and tags of cartridges by several processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from format_setup import wards
from hypothesis import given
from hypothesis import strategies as st
from openai import NotFoundError, OpenAI
from serving_setup import CHAT, MODEL, Served

from cartridge_forge.plugins.library.names import (
    BASE,
    NAME,
    STRATEGY,
    CartridgeName,
    ModelName,
    parse_model,
)
from cartridge_forge.plugins.library.store import CartridgeStore
from cartridge_forge.protocols.errors import DataError

cartridges = st.builds(
    CartridgeName,
    st.from_regex(NAME, fullmatch=True),
    st.none() | st.integers(1, 999_999_999),
)

models = st.builds(
    ModelName,
    st.from_regex(BASE, fullmatch=True),
    st.none() | cartridges,
    st.none() | st.from_regex(STRATEGY, fullmatch=True),
)


@given(models)
def test_a_name_survives_its_text(model: ModelName) -> None:
    assert parse_model(str(model)) == model


@pytest.fixture
def library(tmp_path: Path) -> CartridgeStore:
    return wards(tmp_path)


@pytest.mark.parametrize("tag", ["latest", "7", "", "a/b", "../x", "é", "t" * 33, ".x"])
def test_what_is_no_tag_is_refused(library: CartridgeStore, tag: str) -> None:
    with pytest.raises(DataError, match="is no tag"):
        library.tag(CartridgeName("ward"), tag)


def test_a_request_may_name_a_tag(served: Served, client: OpenAI) -> None:
    def say(model: str) -> tuple[str | None, object]:
        asked = client.chat.completions.create(model=model, messages=CHAT, seed=3, max_tokens=8)
        return asked.choices[0].message.content, asked.forge["cartridge"]  # type: ignore[attr-defined]

    served.house.library.tag(CartridgeName("p1", 1), "best")
    assert say(f"{MODEL}+p1@best") == say(f"{MODEL}+p1@1")
    served.house.library.tag(CartridgeName("p1", 2), "best")
    assert say(f"{MODEL}+p1@best") == say(f"{MODEL}+p1@2")
    served.house.library.untag("p1", "best")
    with pytest.raises(NotFoundError, match="p1 has no tag best"):
        say(f"{MODEL}+p1@best")
