"""Tags and pruning: a word for a version, versions that may go."""

from __future__ import annotations

from pathlib import Path

import pytest
from format_setup import wards
from openai import NotFoundError, OpenAI
from serving_setup import CHAT, MODEL, Served

from cartridge_forge.plugins.library.names import CartridgeName
from cartridge_forge.plugins.library.store import CartridgeStore
from cartridge_forge.protocols.errors import DataError


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
