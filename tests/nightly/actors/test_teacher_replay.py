"""K actors and one purse, at a provider whose bills are lost with some of its answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from replay_setup import KEY, KEY_ENV
from rooms.actors.replay_pool_setup import UNBILLED, spend_a_dollar


def test_eight_actors_never_spend_more_than_a_dollar_where_bills_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)
    spend_a_dollar(tmp_path / "ledger.jsonl", UNBILLED, dear=1)
